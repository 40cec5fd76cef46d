// One row times a q4_0 matrix on Hopper: y[n] = x[k] · W[n, k]ᵀ at the speed at which W comes from memory, with
// what stands around it in the same launch, as in skinny.cu. sm_90a alone; elsewhere the kernel is empty.
//
// A block stays for an equal share of the groups of 16 rows. One thread streams their tiles, which lie one after
// another in memory, through a ring of shared memory in copies of 8 to 16 KB, and starts before the kernel that
// makes x has ended. The other warps share the k of each group; a barrier joins their sums every few groups.
//
// The sums are integers. A nibble in the upper half of a byte, its top bit flipped, is 16 · (q − 8); and x is made
// a fixed-point number of 22 bits, relative to the largest element that its warp has, in three signed digits to
// the base 256: three columns of a product on tensor cores that one row would leave empty. So of a tile the
// lanes unpack 12 instructions' worth where bf16 takes 44, which held skinny.cu at 57% of the memory's speed. An
// element within 2⁻¹⁴ of its warp's largest is exact, others err by at most 2⁻²² of that.
#include "mbarrier.cuh"
#include "ptx.cuh"
#include "skinny.cuh"
#include "types.cuh"
#include "weights.cuh"

using namespace slipstream;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace {

constexpr int kColumns = 64;       // of k in a tile
constexpr int kQuantBytes = 512;   // of a tile
constexpr int kScaleBytes = 64;
constexpr int kTileBytes = kQuantBytes + kScaleBytes;
constexpr int kDigits = 3;
constexpr int kDigitBytes = kDigits * kColumns;  // of x for a tile

// out = a[16×32] · b[32×8] in 8-bit integers. Lane l holds of out rows l/4 and l/4+8, columns 2(l%4) and +1; of a
// the same rows, columns 4(l%4)…+3 and +16; of b rows 4(l%4)…+3 and +16, column l/4.
__device__ __forceinline__ void mma_s8(int (&out)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

__device__ __forceinline__ void store_shared_8(uint32 address, uint32 a, uint32 b) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// The larger of each half's magnitudes, as bits of bf16: NaN above infinity above all else.
__device__ __forceinline__ uint32 larger_magnitudes(uint32 magnitudes, uint32 pair) {
    return __vmaxu2(magnitudes, pair & 0x7fff7fffu);
}

// x as a fixed-point number: below 2²² in magnitude times `factor`; 1 / factor / 16, by which a sum with quants
// of 16 · (q − 8) is multiplied, is NaN if an element is not finite.
struct FixedPoint {
    float factor;
    float unit;

    // largest: bits of the largest magnitude in bf16. Below 2⁻⁸⁷ all are alike, so that both factors are normal.
    __device__ __forceinline__ explicit FixedPoint(uint32 largest) {
        const int exponent = max(40, int(largest >> 7));
        factor = __int_as_float((127 + 148 - exponent) << 23);
        unit = exponent == 255 ? __int_as_float(0x7fffffff) : __int_as_float((exponent - 148 - 4 + 127) << 23);
    }
};

// The digits of 8 elements, highest first, each 64 bytes behind the one before, in the order in which quants hold
// elements: the even nibbles of a word, then the odd ones.
__device__ __forceinline__ void store_digits(uint32 target, const uint4& x, float factor) {
    uint32 biased[8];  // by half of 256 in each digit, so that none is negative
    const uint32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 value = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pairs[i]));
        biased[2 * i] = __float2int_rn(value.x * factor) + 0x808080;
        biased[2 * i + 1] = __float2int_rn(value.y * factor) + 0x808080;
    }
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
        const uint32 select = (2 - digit) | (6 - digit) << 4;
        const auto pack = [&](int a, int b, int c, int d) {
            const uint32 low = __byte_perm(biased[a], biased[b], select);
            return __byte_perm(low, __byte_perm(biased[c], biased[d], select), 0x5410) ^ 0x80808080u;
        };
        store_shared_8(target + digit * kColumns, pack(0, 4, 1, 5), pack(2, 6, 3, 7));
    }
}

// Where things lie in shared memory: the ring, its barriers, x of each warp, then two turns' sums and squares.
template <int kWarps, int kStageBytes, int kWarpDigits>
struct Layout {
    uint32 ring;
    uint32 full;   // barriers by stage: a piece has arrived
    uint32 empty;  // all warps are done with it
    uint32 digits;
    int sums_offset;

    __device__ __forceinline__ Layout(const void* shared, int stages)
        : ring(shared_address(shared)),
          full(ring + stages * kStageBytes),
          empty(full + stages * 8),
          digits(empty + stages * 8),
          sums_offset(stages * (kStageBytes + 16) + kWarps * kWarpDigits) {}
};

// Streams the groups of a block: a piece is kPieceTiles tiles of a group, the last one's maybe fewer.
template <int kGroups, int kPieceTiles, typename Memory>
__device__ __forceinline__ void stream(const Memory& memory, const unsigned char* quants,
                                       const unsigned char* scales, int first, int last, int units, int steps,
                                       int stages) {
    constexpr int kStageBytes = kPieceTiles * kTileBytes;
    RingPlace place;
#pragma unroll 1
    for (int group = first * kGroups; group < last * kGroups; ++group) {
        const int64 row = int64(group / kGroups + group % kGroups * units) * steps;
#pragma unroll 1
        for (int step = 0; step < steps; step += kPieceTiles) {
            const uint32 full = memory.full + place.stage * 8;
            const uint32 target = memory.ring + place.stage * kStageBytes;
            const int tiles = min(kPieceTiles, steps - step);
            barrier_wait(memory.empty + place.stage * 8, place.parity ^ 1);
            barrier_expect(full, tiles * kTileBytes);
            copy_bulk(target, quants + (row + step) * kQuantBytes, tiles * kQuantBytes, full);
            copy_bulk(target + kPieceTiles * kQuantBytes, scales + (row + step) * kScaleBytes,
                      tiles * kScaleBytes, full);
            place.advance(stages);
        }
    }
}

// acc: of rows l/4 and l/4 + 8, in lanes l%4 = 0 of the upper two digits, in lanes l%4 = 1 of the lowest.
__device__ __forceinline__ void multiply(float (&acc)[2], const uint32 (&quants)[4], const uint32 (&scales)[2],
                                         const uint32 (&x)[4], int upper, uint32 nibbles) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32 low = quants[2 * half], high = quants[2 * half + 1];
        const uint32 a[4] = {(low << 4 & nibbles) ^ 0x80808080u, (high << 4 & nibbles) ^ 0x80808080u,
                             (low & nibbles) ^ 0x80808080u, (high & nibbles) ^ 0x80808080u};
        int block[4];
        mma_s8(block, a, x[2 * half], x[2 * half + 1]);
        const float2 factors = __half22float2(reinterpret_cast<const __half2&>(scales[half]));
        acc[0] += factors.x * float(block[0] * upper + block[1]);
        acc[1] += factors.y * float(block[2] * upper + block[3]);
    }
}

}  // namespace

#endif

// x: bf16 [k]; quants, scales: tiles of n rows (kernels/q4.py), with kSwiGlu of 2·n, gates first; k % 32 = 0,
// k ≤ 64 · kWarps · kSteps, n % 16 = 0.
// With kNorm x is normalised: x / rms(x) · (offset + gains), gains bf16 [k]; 1 / rms is applied to the sums.
// y: Out [n]: the product; with kAdd added to what is there; with kSwiGlu silu(gate) · up.
// kSteps: tiles of a group that a warp takes at most, kPiece of them from a stage. kHeld: it keeps its x in
// registers, else in shared memory. Block b takes each + (b < extra) groups (with kSwiGlu pairs), and joins
// the sums of `batch` ≤ 2 · kWarps at a time. 32·kWarps + 32 threads.
// Dynamic shared memory: stages · (kWarps·kPiece·576 + 16) bytes, x, sums (skinny_stream.py).
template <typename Out, int kFinish, bool kNorm, int kWarps, int kSteps, int kPiece, bool kHeld>
__global__ void __launch_bounds__(kWarps * 32 + 32, 2)
    skinny_stream(const bf16* __restrict__ x, const unsigned char* __restrict__ quants,
                  const unsigned char* __restrict__ scales, const bf16* __restrict__ gains, Out* y, int32 n, int32 k,
                  int32 each, int32 extra, int32 stages, int32 batch, float epsilon, float offset) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static_assert(kSteps % kPiece == 0);
    constexpr int kGroups = kFinish == kSwiGlu ? 2 : 1;
    constexpr int kPieceTiles = kWarps * kPiece;
    constexpr int kStageBytes = kPieceTiles * kTileBytes;
    constexpr int kLoads = (kSteps + 3) / 4;                     // of x by a lane, 4 tiles of a warp at a time
    constexpr int kWarpDigits = (kHeld ? 4 : kLoads * 4) * kDigitBytes;
    constexpr int kUnitSums = kGroups * kWarps * kTileRows + 16;  // the 16 keep two units in different banks
    extern __shared__ __align__(128) unsigned char shared[];
    const Layout<kWarps, kStageBytes, kWarpDigits> memory(shared, stages);
    float* sums = reinterpret_cast<float*>(shared + memory.sums_offset);
    float* squares_of = sums + 2 * batch * kUnitSums;

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int units = n / kTileRows;
    const int steps = (k + kColumns - 1) / kColumns;
    const int first = blockIdx.x * each + min(int(blockIdx.x), extra);
    const int last = first + each + (int(blockIdx.x) < extra);

    if (steps % kPieceTiles != 0) {  // x is zero beyond k, so scales that no copy has brought need only be finite
#pragma unroll 1
        for (int i = threadIdx.x; i < stages * kPieceTiles * 8; i += kWarps * 32 + 32)
            store_shared_8(memory.ring + i / (kPieceTiles * 8) * kStageBytes + kPieceTiles * kQuantBytes +
                               i % (kPieceTiles * 8) * 8,
                           0, 0);
        fence_copies();
    }
    if (threadIdx.x == kWarps * 32) {
#pragma unroll 1
        for (int i = 0; i < stages; ++i) {
            barrier_init(memory.full + i * 8, 1);
            barrier_init(memory.empty + i * 8, kWarps);
        }
        fence_barriers();
    }
    __syncthreads();
    if (warp == kWarps) {
        if (lane == 0)
            stream<kGroups, kPieceTiles>(memory, quants, scales, first, last, units, steps, stages);
        return;
    }

    // A warp's tile t of a group is ((t / kPiece) · kWarps + warp) · kPiece + t % kPiece.
    const auto place_of = [&](int load) {
        const int tile = load * 4 + lane / 8;
        const int step = (tile / kPiece * kWarps + warp) * kPiece + tile % kPiece;
        return tile < kSteps ? step * kColumns + lane % 8 * 8 : k;
    };
    uint4 gain[kNorm ? kLoads : 1];
    if constexpr (kNorm)
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            gain[j] = place_of(j) < k ? load_16(gains + place_of(j)) : make_uint4(0, 0, 0, 0);
    wait_for_previous_kernels();
    allow_next_kernel();

    uint4 values[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
        values[j] = place_of(j) < k ? load_16(x + place_of(j)) : make_uint4(0, 0, 0, 0);
    const int finish_unit = threadIdx.x / kTileRows;
    const int finish_row = threadIdx.x % kTileRows;
    float before = 0.0f;
    if constexpr (kFinish == kAdd)
        if (finish_unit < min(batch, last - first))
            before = to_float(y[(first + finish_unit) * kTileRows + finish_row]);
    uint32 magnitudes = 0;
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
        if constexpr (kNorm) values[j] = scaled(values[j], gain[j], offset, squares);
        magnitudes = larger_magnitudes(magnitudes, values[j].x);
        magnitudes = larger_magnitudes(magnitudes, values[j].y);
        magnitudes = larger_magnitudes(magnitudes, values[j].z);
        magnitudes = larger_magnitudes(magnitudes, values[j].w);
    }
    const FixedPoint point(__reduce_max_sync(0xffffffffu, max(magnitudes & 0xffffu, magnitudes >> 16)));
    if constexpr (kNorm) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            squares += __shfl_xor_sync(0xffffffffu, squares, distance);
        if (lane == 0) squares_of[warp] = squares;
    }
    uint32 held[kHeld ? kSteps : 1][4];
    const uint32 warp_digits = memory.digits + warp * kWarpDigits;
    const uint32 my_digits = warp_digits + (min(lane / 4 % 4, 2) * 4 + lane % 4) * 16;  // high, middle, low, low, …
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
        const int tile = lane / 8 + (kHeld ? 0 : j * 4);
        store_digits(warp_digits + tile * kDigitBytes + lane % 4 * 16 + lane / 4 % 2 * 8, values[j], point.factor);
        if constexpr (kHeld) {
            __syncwarp();
#pragma unroll
            for (int t = 0; t < 4; ++t)
                if (j * 4 + t < kSteps) load_shared_16(held[j * 4 + t], my_digits + t * kDigitBytes);
            __syncwarp();
        }
    }
    __syncwarp();
    const int upper = lane % 4 == 1 ? 0 : 256;  // lanes l%4 = 1 have the lowest digit in both columns
    const uint32 my_quants = warp * kPiece * kQuantBytes + lane * 16;
    const uint32 my_scales = kPieceTiles * kQuantBytes + warp * kPiece * kScaleBytes + lane / 4 * 8;
    uint32 nibbles = 0xf0f0f0f0u;
    asm volatile("" : "+r"(nibbles));  // kept in a register: it was moved there again for each tile

    RingPlace place;
    int in_batch = 0;
    int turn = 0;
#pragma unroll 1
    for (int unit = first; unit < last; ++unit) {
#pragma unroll 1
        for (int g = 0; g < kGroups; ++g) {
            float acc[2] = {};
#pragma unroll
            for (int piece = 0; piece < kSteps / kPiece; ++piece) {
                if (piece * kPieceTiles >= steps) break;
                barrier_wait(memory.full + place.stage * 8, place.parity);
                const uint32 stage = memory.ring + place.stage * kStageBytes;
#pragma unroll
                for (int t = 0; t < kPiece; ++t) {
                    uint32 words[4], factors[2], digits[4];
                    load_shared_16(words, stage + my_quants + t * kQuantBytes);
                    load_shared_8(factors, stage + my_scales + t * kScaleBytes);
                    if constexpr (kHeld) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) digits[i] = held[piece * kPiece + t][i];
                    } else {
                        load_shared_16(digits, my_digits + (piece * kPiece + t) * kDigitBytes);
                    }
                    multiply(acc, words, factors, digits, upper, nibbles);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(memory.empty + place.stage * 8);
                place.advance(stages);
            }
            const float low0 = __shfl_down_sync(0xffffffffu, acc[0], 1);
            const float low1 = __shfl_down_sync(0xffffffffu, acc[1], 1);
            float* mine = sums + (turn * batch + in_batch) * kUnitSums + (g * kWarps + warp) * kTileRows;
            if (lane % 4 == 0) {
                mine[lane / 4] = (acc[0] * 256.0f + low0) * point.unit;
                mine[lane / 4 + 8] = (acc[1] * 256.0f + low1) * point.unit;
            }
        }
        if (++in_batch < batch && unit + 1 < last) continue;
        asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory");
        if (finish_unit < in_batch) {
            const float* parts = sums + (turn * batch + finish_unit) * kUnitSums + finish_row;
            float total[kGroups] = {};
            float mean = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
#pragma unroll
                for (int g = 0; g < kGroups; ++g) total[g] += parts[(g * kWarps + w) * kTileRows];
                if constexpr (kNorm) mean += squares_of[w];
            }
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
                if constexpr (kNorm) total[g] *= rsqrtf(mean / k + epsilon);
            float value = total[0] + before;
            if constexpr (kFinish == kSwiGlu) value = silu(total[0]) * total[kGroups - 1];
            y[(unit + 1 - in_batch + finish_unit) * kTileRows + finish_row] = from_float<Out>(value);
            if constexpr (kFinish == kAdd)
                if (finish_unit < min(batch, last - unit - 1))
                    before = to_float(y[(unit + 1 + finish_unit) * kTileRows + finish_row]);
        }
        in_batch = 0;
        turn ^= 1;
    }
#endif
}
