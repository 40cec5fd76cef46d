// 2 to 8 rows times a bf16 matrix on Hopper: y[rows, n] = x[rows, k] · W[n, k]ᵀ, with the residual add or SwiGLU in
// the same launch, as in skinny.cu. sm_90a alone; elsewhere the kernel is empty.
//
// A block stays for an equal share of the groups of 16 rows of W. A warp streams pieces of them through a ring of
// shared memory, a lane each row, and starts before the kernel that makes x has ended. Rows lie 64 bytes further
// apart there than they are long, so that two of them do not meet in a bank. The other warps share the k of each
// group, hold their part of x in registers, and a barrier joins their sums every other group.
//
// A row's sum does not depend on how many rows there are.
#include "mbarrier.cuh"
#include "ptx.cuh"
#include "skinny.cuh"
#include "types.cuh"
#include "weights.cuh"

using namespace slipstream;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace {

constexpr int kChunkBytes = 64;  // of a row: what a warp multiplies at once of 16 rows
constexpr int kRowPad = 64;

// Streams the groups of a block: a piece is up to kPieceBytes of each of a group's 16 rows. The next kernel is let
// in when the ring has been filled once.
template <int kGroups, int kPieceBytes>
__device__ __forceinline__ void stream(uint32 ring, uint32 full, uint32 empty, const unsigned char* weights,
                                       int first, int last, int units, int row_bytes, int stages) {
    constexpr int kStride = kPieceBytes + kRowPad;
    const int lane = threadIdx.x % 32;
    RingPlace place;
    int index = 0;
    const auto let_next = [] {
        wait_for_previous_kernels();
        allow_next_kernel();
    };
#pragma unroll 1
    for (int group = first * kGroups; group < last * kGroups; ++group) {
        const int64 tile = group / kGroups + group % kGroups * units;
        const unsigned char* source = weights + (tile * kTileRows + lane % kTileRows) * row_bytes;
#pragma unroll 1
        for (int at = 0; at < row_bytes; at += kPieceBytes, ++index) {
            if (index == stages) let_next();
            const int bytes = min(kPieceBytes, row_bytes - at);
            const uint32 barrier = full + place.stage * 8;
            barrier_wait(empty + place.stage * 8, place.parity ^ 1);
            if (lane == 0) barrier_expect(barrier, bytes * kTileRows);
            __syncwarp();
            if (lane < kTileRows)
                copy_bulk(ring + (place.stage * kTileRows + lane) * kStride, source + at, bytes, barrier);
            place.advance(stages);
        }
    }
    if (index <= stages) let_next();
}

// 8 rows of x against a chunk of 16 rows of W, of which the lane has 16 bytes of rows l/4 and l/4 + 8. Into two sums
// in turn: a product waits for the one before it.
__device__ __forceinline__ void multiply(float (&acc)[2][4], const uint32 (&low)[4], const uint32 (&high)[4],
                                         const uint4& x) {
    const uint32 first[4] = {low[0], high[0], low[1], high[1]};
    const uint32 second[4] = {low[2], high[2], low[3], high[3]};
    mma_bf16(acc[0], first, x.x, x.y);
    mma_bf16(acc[1], second, x.z, x.w);
}

}  // namespace

#endif

// x: bf16 [rows ≤ 8, k]; weights: bf16 of n rows, with kSwiGlu of 2·n, gates first; k % 32 = 0,
// k ≤ 32 · kWarps · kSteps, n % 16 = 0.
// y: bf16 [rows, n]: the product; with kAdd added to what is there; with kSwiGlu silu(gate) · up.
// kSteps: chunks of 32 of k that a warp takes of a group at most, kPiece of them from a stage.
// Block b takes each + (b < extra) groups (with kSwiGlu pairs), and joins the sums of `batch` at a time, of which
// 2^shift ≥ rows rows are kept: batch · 16 << shift ≤ 32 · kWarps. 32·kWarps + 32 threads.
// Dynamic shared memory: stages · (16 · (64·kWarps·kPiece + 64) + 16) bytes, then the sums (skinny_rows.py).
template <int kFinish, int kWarps, int kSteps, int kPiece, int kResident>
__global__ void __launch_bounds__(kWarps * 32 + 32, kResident)
    skinny_rows(const bf16* __restrict__ x, const unsigned char* __restrict__ weights, bf16* y, int32 rows,
                int32 shift, int32 n, int32 k, int32 each, int32 extra, int32 stages, int32 batch) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static_assert(kSteps % kPiece == 0);
    constexpr int kGroups = kFinish == kSwiGlu ? 2 : 1;
    constexpr int kPieceBytes = kWarps * kPiece * kChunkBytes;
    constexpr int kStride = kPieceBytes + kRowPad;
    constexpr int kStageBytes = kTileRows * kStride;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const uint32 ring = shared_address(shared);
    const uint32 full = ring + stages * kStageBytes;  // barriers by stage: a piece has arrived
    const uint32 empty = full + stages * 8;           // all warps are done with it
    float* sums = reinterpret_cast<float*>(shared + stages * (kStageBytes + 16));
    const int unit_sums = kGroups * kWarps * kTileRows << shift;

    const int units = n / kTileRows;
    const int row_bytes = 2 * k;
    const int first = blockIdx.x * each + min(int(blockIdx.x), extra);
    const int last = first + each + (int(blockIdx.x) < extra);

    if (threadIdx.x == kWarps * 32) {
#pragma unroll 1
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, kWarps);
        }
        fence_barriers();
    }
    __syncthreads();
    if (warp == kWarps) {
        stream<kGroups, kPieceBytes>(ring, full, empty, weights, first, last, units, row_bytes, stages);
        return;
    }

    // A warp's chunk t of a group is ((t / kPiece) · kWarps + warp) · kPiece + t % kPiece.
    const auto chunk_of = [&](int t) { return (t / kPiece * kWarps + warp) * kPiece + t % kPiece; };
    const bool has_row = lane / 4 < rows;  // other lanes' columns are of no use
    wait_for_previous_kernels();

    uint4 held[kSteps];
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
        const int place = chunk_of(t) * 32 + lane % 4 * 8;
        held[t] = has_row && place < k ? load_16(x + int64(lane / 4) * k + place) : make_uint4(0, 0, 0, 0);
    }
    const int finish_unit = threadIdx.x >> (4 + shift);
    const int finish_column = threadIdx.x >> 4 & ((1 << shift) - 1);
    const int finish_row = threadIdx.x % kTileRows;
    const bool finishes = finish_column < rows;
    bf16* const target = y + int64(finish_column) * n + finish_row;
    float before = 0.0f;
    if constexpr (kFinish == kAdd)
        if (finishes && finish_unit < min(batch, last - first))
            before = to_float(target[(first + finish_unit) * kTileRows]);
    const uint32 mine = ring + lane / 4 * kStride + warp * kPiece * kChunkBytes + lane % 4 * 16;

    RingPlace place;
    int in_batch = 0;
    int turn = 0;
#pragma unroll 1
    for (int unit = first; unit < last; ++unit) {
#pragma unroll 1
        for (int g = 0; g < kGroups; ++g) {
            float acc[2][4] = {};
#pragma unroll
            for (int piece = 0; piece < kSteps / kPiece; ++piece) {
                if (piece * kPieceBytes >= row_bytes) break;
                barrier_wait(full + place.stage * 8, place.parity);
                const uint32 stage = mine + place.stage * kStageBytes;
#pragma unroll
                for (int i = 0; i < kPiece; ++i) {
                    const int t = piece * kPiece + i;
                    if (chunk_of(t) * kChunkBytes >= row_bytes) break;  // nothing that a copy has brought
                    uint32 low[4], high[4];
                    load_shared_16(low, stage + i * kChunkBytes);
                    load_shared_16(high, stage + i * kChunkBytes + 8 * kStride);
                    multiply(acc, low, high, held[t]);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + place.stage * 8);
                place.advance(stages);
            }
            float* part =
                sums + (turn * batch + in_batch) * unit_sums + ((g * kWarps + warp) * kTileRows << shift);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int column = lane % 4 * 2 + j % 2;
                if (column < rows) part[column * kTileRows + lane / 4 + j / 2 * 8] = acc[0][j] + acc[1][j];
            }
        }
        if (++in_batch < batch && unit + 1 < last) continue;
        asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory");
        if (finishes && finish_unit < in_batch) {
            const float* parts =
                sums + (turn * batch + finish_unit) * unit_sums + finish_column * kTileRows + finish_row;
            const int here = unit + 1 - in_batch + finish_unit;
            float total[kGroups] = {};
#pragma unroll
            for (int w = 0; w < kWarps; ++w)
#pragma unroll
                for (int g = 0; g < kGroups; ++g) total[g] += parts[(g * kWarps + w) * kTileRows << shift];
            float value = total[0] + before;
            if constexpr (kFinish == kSwiGlu) value = silu(total[0]) * total[kGroups - 1];
            target[here * kTileRows] = from_float<bf16>(value);
            if constexpr (kFinish == kAdd)
                if (finish_unit < min(batch, last - unit - 1))
                    before = to_float(target[(unit + 1 + finish_unit) * kTileRows]);
        }
        in_batch = 0;
        turn ^= 1;
    }
#endif
}
