// Products with q4_0 weights: y[rows, n] = x[rows, k] · W[n, k]ᵀ in slabs of up to 64 rows, float32 sums, with the
// residual add or SwiGLU after it in the same launch.
//
// W streams from global memory into registers and there becomes the A operand of tensor-core products: q − 8,
// exact in bf16, times the block's scale, both rounded to bf16. It is on its way before the kernel that makes x
// has ended. x goes through a ring in shared memory, which 16 · kWarps rows of W share.
//
// Few rows of W make few blocks, so k is split over the blocks of a cluster; they add up each other's partial
// sums out of shared memory in a fixed order, so the same inputs give the same bits.
#include "q4_gemm.cuh"

using namespace slipstream;

namespace {

constexpr int kStages = 4;            // x tiles in shared memory
constexpr int kAhead = kStages - 2;   // tiles from copy to use; the one before may still be read
constexpr int kMostBlocks = 8;        // of a cluster
constexpr int kPad = 4;               // floats; keeps the columns of partial sums in different banks

enum Finish { kStore = 0, kAdd = 1, kSwiGlu = 2 };

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + __expf(-x));
}

template <typename Out>
__device__ __forceinline__ void finish_four(Out* y, float4 sums, int finish) {
    float values[4] = {sums.x, sums.y, sums.z, sums.w};
    if (finish == kAdd) {
        float before[4];
        load_floats(y, before);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] += before[i];
    }
    store_floats(y, values);
}

// Partial sums of one column's four rows over the cluster's blocks, in their order.
__device__ __forceinline__ float4 sum_of_blocks(uint32 address, int blocks) {
    float4 parts[kMostBlocks];
#pragma unroll
    for (int rank = 0; rank < kMostBlocks; ++rank)
        if (rank < blocks) parts[rank] = load_remote(address, rank);
    float4 sum = parts[0];
#pragma unroll
    for (int rank = 1; rank < kMostBlocks; ++rank) {
        if (rank >= blocks) break;
        sum.x += parts[rank].x, sum.y += parts[rank].y, sum.z += parts[rank].z, sum.w += parts[rank].w;
    }
    return sum;
}

// What a block needs to turn its cluster's sums into rows of y.
struct Result {
    void* y;
    int32 n;
    int32 first_column;
    int32 columns;
    int32 finish;
    int32 wide;
};

// This block's share of the sums. `sums`: shared address, columns of kHeight + kPad floats.
template <int kHeight, int kThreads>
__device__ __forceinline__ void finish_rows(const Result& result, uint32 sums) {
    const int blocks = gridDim.x;
    const int out_rows = result.finish == kSwiGlu ? kHeight / 2 : kHeight;
    const int first_row = blockIdx.y * out_rows;
    const int fours = out_rows / 4;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < result.columns * fours; i += blocks * kThreads) {
        const int column = i / fours;
        const int row = i % fours * 4;
        const uint32 address = sums + (column * (kHeight + kPad) + row) * 4;
        float4 value = sum_of_blocks(address, blocks);
        if (result.finish == kSwiGlu) {
            const float4 up = sum_of_blocks(address + out_rows * 4, blocks);
            value.x = silu(value.x) * up.x, value.y = silu(value.y) * up.y;
            value.z = silu(value.z) * up.z, value.w = silu(value.w) * up.w;
        }
        if (first_row + row >= result.n) continue;
        const int64 place = int64(result.first_column + column) * result.n + first_row + row;
        if (result.wide)
            finish_four(static_cast<float*>(result.y) + place, value, result.finish);
        else
            finish_four(static_cast<bf16*>(result.y) + place, value, result.finish);
    }
    __syncwarp();
}

}  // namespace

// x: bf16 [rows, k]. quants, scales: tiles of W [n, k], with kSwiGlu of [2·n, k], gates first; k % 32 = 0, n % 16 = 0.
// y: [rows, n] float32 if `wide`, else bf16: the product; with kAdd added to what is there; with kSwiGlu
// silu(gate) · up.
// Grid (blocks of a cluster, ⌈n / rows of y per block⌉, ⌈rows / kColumns⌉), 32·kWarps threads. A block has
// 16 · kWarps rows of W, with kSwiGlu half of them gates. Clusters of gridDim.x ≤ 8 blocks, ≤ ⌈k / 64⌉.
template <int kColumns, int kWarps, int kDepth, int kResident, bool kWarpgroup>
__global__ void __launch_bounds__(kWarps * 32, kResident)
    q4_gemm(const bf16* __restrict__ x, const unsigned char* __restrict__ quants,
            const __half* __restrict__ scales, void* y, int32 rows, int32 n, int32 k, int32 finish, int32 wide) {
    constexpr int kHeight = kWarps * kQ4TileRows;
    constexpr int kRing = kStages * kXTileBytes<kColumns>;
    constexpr int kSums = kColumns * (kHeight + kPad) * 4;
    constexpr bool kByWarpgroup = kWarpgroup && kHasWarpgroupProducts;
    __shared__ __align__(1024) unsigned char memory[kRing > kSums ? kRing : kSums];
    const uint32 ring = shared_address(memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int blocks = gridDim.x;

    const int block_tiles = finish == kSwiGlu ? kWarps / 2 : kWarps;
    const int within = min(int(blockIdx.y) * block_tiles + warp % block_tiles, n / kQ4TileRows - 1);
    const int tile_row = within + warp / block_tiles * (n / kQ4TileRows);
    const int tile_columns = (k + kQ4TileColumns - 1) / kQ4TileColumns;
    const int first = tile_columns * blockIdx.x / blocks;
    const int count = tile_columns * (blockIdx.x + 1) / blocks - first;

    Q4Piece pieces[kDepth] = {};
    Q4Source source(quants, scales, lane);  // of the next tiles to load
    source.advance(tile_row * tile_columns + first);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) load_q4_piece(pieces[i], source, i, i < count);
    wait_for_previous_kernels();
    allow_next_kernel();

    const int first_column = blockIdx.z * kColumns;
    const int columns = min(rows - first_column, kColumns);
    const bf16* lane_x = x + int64(first_column) * k + first * kQ4TileColumns + lane * 2;
    const bool half_tile = k % kQ4TileColumns != 0 && first + count == tile_columns && lane >= 16;
    const auto copy_x = [&](int tile) {
        if (tile < count) {
            // Past the end of k the weights are 0: any finite x will do.
            const int offset = tile * kQ4TileColumns - (half_tile && tile == count - 1 ? kQ4Block : 0);
            copy_x_tile<kColumns, kWarps>(ring + tile % kStages * kXTileBytes<kColumns>, lane_x + offset, k,
                                          columns - 1, warp, lane);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy_x(i);

    const uint32 mask = q4_pair_mask(rows);
    float acc[kColumns / 8][4] = {};
    for (int base = 0; base < count; base += kDepth) {
        source.advance(kDepth);
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            const int tile = base + i;
            if (tile >= count) break;
            copy_async_wait<kAhead - 1>();
            if constexpr (kByWarpgroup) fence_for_warpgroup_products();
            __syncthreads();
            copy_x(tile + kAhead);
            const uint32 x_tile = ring + tile % kStages * kXTileBytes<kColumns>;
            const Q4Piece& piece = pieces[i];
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                const Q4Fragments a =
                    block ? q4_fragments(piece.words.z, piece.words.w, piece.scales.y, mask)
                          : q4_fragments(piece.words.x, piece.words.y, piece.scales.x, mask);
                multiply<kColumns, kByWarpgroup>(acc, a, x_tile, block, lane);
            }
            load_q4_piece(pieces[i], source, i, tile + kDepth < count);
        }
    }
    if constexpr (kByWarpgroup) wait_for_warpgroup_products<0>();
    copy_async_wait<0>();
    __syncthreads();

    float* sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            sums[(i * 8 + lane % 4 * 2 + j % 2) * (kHeight + kPad) + warp * kQ4TileRows + lane / 4 + j / 2 * 8] =
                acc[i][j];
    cluster_barrier(blocks);
    finish_rows<kHeight, kWarps * 32>({y, n, first_column, columns, finish, wide}, ring);
    cluster_barrier(blocks);
}
