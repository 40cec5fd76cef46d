// Matrix products of at most 8 rows: y[rows, n] = x[rows, k] · W[n, k]ᵀ for W in bf16, FP8 or q4_0, with what stands
// around them in the same launch: the RMSNorm before it, the residual add or SwiGLU after it.
//
// Bound by the bytes of W, and for small W by latency. A team of warps shares the k of 16 rows of W (the rows of a
// tensor-core product; its 8 columns are rows of x), and a block's teams take tile after tile, a grid apart. Each
// lane copies its pieces of W asynchronously into its own part of a ring in shared memory (weights.cuh), on and
// on over the tiles. With dependent launch the ring is full before the kernel that makes x has ended.
//
// A row's sum does not depend on how many rows there are.
#include "ptx.cuh"
#include "skinny.cuh"
#include "types.cuh"
#include "weights.cuh"

using namespace slipstream;

// x: bf16 [rows, k], rows ≤ kRows; weights, scales: of n rows, with kSwiGlu of 2·n, gates first; k % 32 = 0,
// n % 16 = 0.
// With kNorm x is normalised: x / rms(x) · (offset + gains), gains bf16 [k]; 1 / rms is applied to the sums.
// y: Out [rows, n]: the product; with kAdd added to what is there; with kSwiGlu silu(gate) · up.
// kStaged: x is brought into shared memory once a block; else each warp reads what it needs when it does.
// Any grid; 32·kWarps threads in teams of kShare warps; kGroup tiles of k at once. Dynamic shared memory:
// kStages · the ring's stage, the sums, then x if staged.
template <template <int> class Weights, typename Out, int kFinish, bool kNorm, int kRows, bool kStaged, int kWarps,
          int kShare, int kGroup, int kStages, int kResident>
__global__ void __launch_bounds__(kWarps * 32, kResident)
    skinny_product(const bf16* __restrict__ x, const void* __restrict__ weights, const void* __restrict__ scales,
                   const bf16* __restrict__ gains, Out* y, int32 rows, int32 n, int32 k, float epsilon,
                   float offset) {
    static_assert(!kNorm || (kStaged && kRows == 1));
    static_assert(kShare * 32 >= kRows * kTileRows && kWarps % kShare == 0);
    constexpr int kThreads = kWarps * 32;
    constexpr int kTeams = kWarps / kShare;
    constexpr int kTiles = kFinish == kSwiGlu ? 2 : 1;
    constexpr bool kEarly = !kStaged && kGroup == 1;  // x of the next group is read before this one's products
    using Weight = Weights<kThreads>;
    constexpr int kTileBytes = Weight::kLaneBytes * kThreads;
    constexpr int kStageBytes = kTiles * kGroup * kTileBytes;
    extern __shared__ __align__(128) unsigned char shared[];
    using Sums = float[kShare][kTiles][kRows][kTileRows];
    Sums* parts = reinterpret_cast<Sums*>(shared + kStages * kStageBytes);  // two of each team, in turn
    float* squares_of = reinterpret_cast<float*>(parts + 2 * kTeams);
    bf16* const staged = reinterpret_cast<bf16*>(squares_of + 32);

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int team = warp / kShare;
    const int member = warp % kShare;
    const int n_tiles = n / kTileRows;
    const int whole_steps = k / kTileColumns;
    const int steps = (k + kTileColumns - 1) / kTileColumns;
    const int groups = (steps + kGroup - 1) / kGroup;
    const int first_tile = blockIdx.x + team * gridDim.x;
    const int stride = kTeams * gridDim.x;
    const Weight weight(weights, scales, k, lane);
    const uint32 ring = shared_address(shared) + threadIdx.x * 16;

    int fetch_tile = member < groups ? first_tile : n_tiles;
    int fetch_group = member;
    typename Weight::Rows fetch_rows[kTiles];
    const auto aim = [&] {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) fetch_rows[t] = weight.rows(fetch_tile + t * n_tiles);
    };
    const auto fetch_next = [&](uint32 stage) {
        if (fetch_tile < n_tiles) {
            const int first = fetch_group * kGroup;
            if (first + kGroup <= whole_steps) {
#pragma unroll
                for (int t = 0; t < kTiles; ++t)
                    weight.template fetch<kGroup>(stage + t * kGroup * kTileBytes, fetch_rows[t], first);
            } else {
                for (int t = 0; t < kTiles; ++t)
                    for (int i = 0; i < kGroup; ++i)
                        weight.fetch_cut(stage + (t * kGroup + i) * kTileBytes, fetch_rows[t], first + i);
            }
            fetch_group += kShare;
            if (fetch_group >= groups) {
                fetch_group = member;
                fetch_tile += stride;
                aim();
            }
        }
        copy_async_commit();
    };
    aim();
#pragma unroll
    for (int i = 0; i < kStages; ++i) fetch_next(ring + i * kStageBytes);
    if constexpr (kNorm)
        for (int i = threadIdx.x * 8; i < k; i += kThreads * 8)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(gains + i));
    wait_for_previous_kernels();
    allow_next_kernel();

    const bool has_row = lane / 4 < rows;  // other lanes' columns are of no use
    const int row_stride = groups * kGroup * kTileColumns + Weight::kRowPad;
    if constexpr (kStaged) {
        const int chunks = groups * kGroup * (kTileColumns / 8);
        float squares = 0.0f;
        for (int row = 0; row < (kRows == 1 ? 1 : rows); ++row) {
#pragma unroll 4
            for (int i = threadIdx.x; i < chunks; i += kThreads) {
                uint4 values = make_uint4(0, 0, 0, 0);
                if (i * 8 < k) {
                    values = load_16(x + int64(row) * k + i * 8);
                    if constexpr (kNorm)
                        values = scaled(values, *reinterpret_cast<const uint4*>(gains + i * 8), offset, squares);
                }
                *reinterpret_cast<uint4*>(staged + row * row_stride + i * 8) = values;
            }
        }
        if constexpr (kNorm) {
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                squares += __shfl_xor_sync(0xffffffffu, squares, distance);
            if (lane == 0) squares_of[warp] = squares;
        }
        __syncthreads();
    }
    const bf16* x_lane = kStaged ? staged + lane / 4 * row_stride : x + int64(lane / 4) * k;
    uint4 held[kGroup][2] = {};  // x of the group that comes next
    const auto hold_x = [&](int group) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int place =
                    (group * kGroup + i) * kTileColumns + half * Weight::kHalfOffset + Weight::x_offset(lane);
                if (!has_row) continue;
                if constexpr (kStaged)
                    held[i][half] = *reinterpret_cast<const uint4*>(x_lane + place);
                else
                    held[i][half] = place < k ? load_16(x_lane + place) : make_uint4(0, 0, 0, 0);
            }
    };
    if (member < groups) hold_x(member);

    uint32 stage = ring;
    int turn = 0;
    for (int tile = first_tile; tile < n_tiles; tile += stride, ++turn) {
        // The threads that finish a tile change from tile to tile.
        const int output = (threadIdx.x + turn * kRows * kTileRows) % (kShare * 32);
        const int column = output / kTileRows;  // row of x
        const int row = tile * kTileRows + output % kTileRows;
        const bool finishes = column < (kRows == 1 ? 1 : rows);
        Out* target = y + int64(column) * n + row;
        float before = 0.0f;
        float row_scale[kTiles] = {};
        if (finishes) {
            if constexpr (kFinish == kAdd) before = to_float(*target);
            if constexpr (Weight::kRowScales)
                for (int t = 0; t < kTiles; ++t) row_scale[t] = static_cast<const float*>(scales)[t * n + row];
        }

        float acc[kTiles][4] = {};
        for (int group = member; group < groups; group += kShare) {
            copy_async_wait<kStages - 1>();
            uint4 taken[kGroup][2];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) taken[i][0] = held[i][0], taken[i][1] = held[i][1];
            const int next = group + kShare < groups ? group + kShare : member;
            if (kEarly && groups > kShare) hold_x(next);
#pragma unroll
            for (int i = 0; i < kGroup; ++i)
#pragma unroll
                for (int t = 0; t < kTiles; ++t)
                    weight.multiply(acc[t], stage + (t * kGroup + i) * kTileBytes, taken[i]);
            if (!kEarly && groups > kShare) hold_x(next);
            fetch_next(stage);
            stage = stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
        }

        Sums& sums = parts[team * 2 + turn % 2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (kRows > 1 || (lane % 4 == 0 && j % 2 == 0))
                    sums[member][t][kRows == 1 ? 0 : lane % 4 * 2 + (j & 1)][lane / 4 + j / 2 * 8] = acc[t][j];
        if constexpr (kTeams == 1)
            __syncthreads();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kShare * 32) : "memory");
        if (!finishes) continue;
        float total[kTiles] = {};
#pragma unroll
        for (int w = 0; w < kShare; ++w)
#pragma unroll
            for (int t = 0; t < kTiles; ++t) total[t] += sums[w][t][column][output % kTileRows];
        float mean = 0.0f;
        if constexpr (kNorm)
#pragma unroll
            for (int w = 0; w < kWarps; ++w) mean += squares_of[w];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            if constexpr (kNorm) total[t] *= rsqrtf(mean / k + epsilon);
            if constexpr (Weight::kRowScales) total[t] *= row_scale[t];
        }
        float value = total[0] + before;
        if constexpr (kFinish == kSwiGlu) value = silu(total[0]) * total[kTiles - 1];
        *target = from_float<Out>(value);
    }
}
