// Products with q4_0 weights: y[rows, n] = x[rows, k] · W[n, k]ᵀ in slabs of up to 64 rows, float32 sums, with the
// residual add or SwiGLU after it in the same launch.
//
// x stays: a block keeps its part of k of all rows of x in shared memory and goes through its rows of W, so x is
// read once a block and the main loop has no barrier. W streams from global memory into registers and there becomes
// the A operand of tensor-core products: q − 8, exact in bf16, times the block's scale, both rounded to bf16. It is
// on its way before the kernel that makes x has ended.
//
// k is split over the blocks of a cluster; they add up each other's partial sums out of shared memory in a fixed
// order, so the same inputs give the same bits.
#include "q4_gemm.cuh"

using namespace slipstream;

namespace {

constexpr int kChunks = 4;      // of x, copied in turn so that the first tiles can begin early
constexpr int kPad = 4;         // floats; keeps the columns of partial sums in different banks

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

// Partial sums of one column's four rows over the cluster's blocks, in their order. `blocks`: a power of two.
__device__ __forceinline__ float4 sum_of_blocks(uint32 address, int blocks) {
    float4 sum = {};
    const auto add = [&](const float4& part) {
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    };
    if (blocks < 4) {
        for (int rank = 0; rank < blocks; ++rank) add(load_remote(address, rank));
        return sum;
    }
    for (int rank = 0; rank < blocks; rank += 4) {
        float4 parts[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) parts[i] = load_remote(address, rank + i);
#pragma unroll
        for (int i = 0; i < 4; ++i) add(parts[i]);
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

// This block's share of the sums of one row block, from `first_row` of y on. `sums`: shared, columns of kHeight + kPad.
template <int kHeight, int kThreads>
__device__ __forceinline__ void finish_rows(const Result& result, uint32 sums, int first_row) {
    const int blocks = gridDim.x;
    const int out_rows = result.finish == kSwiGlu ? kHeight / 2 : kHeight;
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
// Grid (blocks of a cluster, clusters, ⌈rows / kColumns⌉), 32·kWarps threads. A row block has 16 · kWarps rows of W,
// with kSwiGlu half of them gates; a cluster takes every gridDim.y-th. Clusters of gridDim.x = 1, 2, 4 or 8 blocks,
// ≤ ⌈k / 64⌉.
// Dynamic shared memory: x_tiles = ⌈⌈k / 64⌉ / gridDim.x⌉ tiles of x, and kColumns · (16 · kWarps + 4) floats, which
// may lie over x if there are no more row blocks than clusters: sums_offset, in bytes.
template <int kColumns, int kWarps, int kDepth, int kResident, bool kWarpgroup>
__global__ void __launch_bounds__(kWarps * 32, kResident)
    q4_gemm(const bf16* __restrict__ x, const unsigned char* __restrict__ quants,
            const __half* __restrict__ scales, void* y, int32 rows, int32 n, int32 k, int32 finish, int32 wide,
            int32 sums_offset) {
    constexpr int kHeight = kWarps * kQ4TileRows;
    constexpr bool kByWarpgroup = kWarpgroup && kHasWarpgroupProducts;
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32 x_tiles = shared_address(memory);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int blocks = gridDim.x;

    const int block_tiles = finish == kSwiGlu ? kWarps / 2 : kWarps;
    const int tile_rows = n / kQ4TileRows;
    const int row_blocks = (tile_rows + block_tiles - 1) / block_tiles;
    const int tile_columns = (k + kQ4TileColumns - 1) / kQ4TileColumns;
    const int first = tile_columns * blockIdx.x / blocks;
    const int count = tile_columns * (blockIdx.x + 1) / blocks - first;
    // The lane's part of the first tile of its row of tiles in a row block; past the end it takes the last row's.
    const auto first_tile = [&](int row_block) {
        const int within = min(row_block * block_tiles + warp % block_tiles, tile_rows - 1);
        return uint32((within + warp / block_tiles * tile_rows) * tile_columns + first);
    };

    Q4Piece pieces[kDepth] = {};
    Q4Source source(quants, scales, lane);  // of the next tiles to load
    source.advance(first_tile(blockIdx.y));
#pragma unroll
    for (int i = 0; i < kDepth; ++i) load_q4_piece(pieces[i], source, i, i < count);
    wait_for_previous_kernels();
    allow_next_kernel();

    const int first_column = blockIdx.z * kColumns;
    const int columns = min(rows - first_column, kColumns);
    const bf16* lane_x = x + int64(first_column) * k + first * kQ4TileColumns + lane * 2;
    // Past the end of k the weights are 0: any finite x will do.
    const bool half_tile = k % kQ4TileColumns != 0 && first + count == tile_columns && lane >= 16;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int end = count * (chunk + 1) / kChunks * kColumns;
#pragma unroll 4
        for (int i = count * chunk / kChunks * kColumns + warp; i < end; i += kWarps) {
            const int tile = i / kColumns;
            copy_x_column<kColumns>(x_tiles, lane_x, k, tile, i % kColumns, columns - 1,
                                    half_tile && tile == count - 1 ? kQ4Block : 0, lane);
        }
        copy_async_commit();
    }

    const uint32 mask = q4_pair_mask(rows);
    const Result result = {y, n, first_column, columns, finish, wide};
    float* sums = reinterpret_cast<float*>(memory + sums_offset);
    int chunk = 0;  // of x, the next to wait for
    for (int row_block = blockIdx.y; row_block < row_blocks; row_block += gridDim.y) {
        const bool another = row_block + int(gridDim.y) < row_blocks;
        float acc[kColumns / 8][4] = {};
        for (int base = 0; base < count; base += kDepth) {
            int to_load = count - base - kDepth;
            if (to_load > 0) {
                source.advance(kDepth);
            } else {
                source = Q4Source(quants, scales, lane);
                source.advance(first_tile(row_block + gridDim.y));
                to_load = another ? count : 0;
            }
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
                const int tile = base + i;
                if (tile < count) {
                    while (chunk < kChunks && tile >= count * chunk / kChunks) {
                        copy_async_wait_for(kChunks - 1 - chunk++);
                        if constexpr (kByWarpgroup) fence_for_warpgroup_products();
                        __syncthreads();
                    }
                    const uint32 x_tile = x_tiles + tile * kXTileBytes<kColumns>;
                    const Q4Piece& piece = pieces[i];
#pragma unroll
                    for (int block = 0; block < 2; ++block) {
                        const Q4Fragments a =
                            block ? q4_fragments(piece.words.z, piece.words.w, piece.scales.y, mask)
                                  : q4_fragments(piece.words.x, piece.words.y, piece.scales.x, mask);
                        multiply<kColumns, kByWarpgroup>(acc, a, x_tile, block, lane);
                    }
                }
                load_q4_piece(pieces[i], source, i, i < to_load);
            }
        }
        if constexpr (kByWarpgroup) wait_for_warpgroup_products<0>();

        if (row_block != blockIdx.y) {
            cluster_or_block_wait(blocks);  // the cluster has read the sums of the row block before
        } else if (sums_offset == 0) {
            __syncthreads();  // the block has read its x
        }
#pragma unroll
        for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sums[(i * 8 + lane % 4 * 2 + j % 2) * (kHeight + kPad) + warp * kQ4TileRows + lane / 4 + j / 2 * 8] =
                    acc[i][j];
        cluster_or_block_arrive(blocks);
        cluster_or_block_wait(blocks);
        finish_rows<kHeight, kWarps * 32>(result, shared_address(sums), row_block * block_tiles * kQ4TileRows);
        cluster_or_block_arrive(blocks);
    }
    cluster_or_block_wait(blocks);
}
