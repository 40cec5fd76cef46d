// Attention of ragged prompt segments over KV pages: causal, with windows, on mma.sync tensor cores.
//
// Bound by arithmetic. The query heads that share a kv head share a tile: packed row i of a segment is head
// i % group at position i / group, so K and V are read once for all of them. Each warp owns 16·kTilesM rows;
// key tiles alternate between two shared stages, the next one loading while this one is used.
//
// Keys of the segment itself are in the pages already (rope_and_write), so prefix and chunk are one loop.
#include "attention.cuh"

using namespace slipstream;

namespace {

// One block's rows. Made by the host: kernels/attention_prefill.py.
struct alignas(16) QueryTile {
    int32 slot;
    int32 segment_row;  // row of the segment's first token in query and out
    int32 segment_length;
    int32 start;         // position of that token
    int32 first_packed;  // this tile's first packed row
    int32 unused[3];
};

template <int kHeadDim, int kWarps, int kTilesM, int kKeys>
struct PrefillShape {
    static constexpr int kRows = kWarps * kTilesM * 16;
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kQueryBytes = kRows * kHeadDim * 2;
    static constexpr int kTileBytes = kKeys * kHeadDim * 2;
};

// Fills the block's query tile. Packed rows past the segment become zeros.
template <typename Shape, int kHeadDim>
__device__ __forceinline__ void load_queries(const bf16* query, const QueryTile& tile, uint32 target,
                                             int n_heads, int kv_head, int group) {
    using Layout = TileLayout<kHeadDim>;
#pragma unroll 4
    for (int i = threadIdx.x; i < Shape::kRows * Layout::kChunks; i += Shape::kThreads) {
        const int row = i / Layout::kChunks;
        const int chunk = i % Layout::kChunks;
        const int packed = tile.first_packed + row;
        const int position = packed / group;
        const bool valid = position < tile.segment_length;
        const int64 head_row =
            int64(tile.segment_row + (valid ? position : 0)) * n_heads + kv_head * group + packed % group;
        copy_async_16(target + Layout::offset(row, chunk), query + head_row * kHeadDim + chunk * 8, valid);
    }
}

// Fills a stage with keys key0 … of one page. Keys from key_end on become zeros.
template <typename Shape, int kHeadDim, int kKeys>
__device__ __forceinline__ void load_key_tile(const bf16* k_pages, const bf16* v_pages, const int32* pages,
                                              int kv_head, int n_kv_heads, int key0, int key_end,
                                              uint32 stage) {
    using Layout = TileLayout<kHeadDim>;
    const int64 page_head = int64(pages[key0 / kPageSize]) * n_kv_heads + kv_head;
    const int64 base = (page_head * kPageSize + key0 % kPageSize) * kHeadDim;
#pragma unroll
    for (int i = 0; i < kKeys * Layout::kChunks / Shape::kThreads; ++i) {
        const int chunk = i * Shape::kThreads + threadIdx.x;
        const int row = chunk / Layout::kChunks;
        const bool valid = key0 + row < key_end;
        const uint32 target = stage + Layout::offset(row, chunk % Layout::kChunks);
        copy_async_16(target, k_pages + base + chunk * 8, valid);
        copy_async_16(target + Shape::kTileBytes, v_pages + base + chunk * 8, valid);
    }
}

// Sets the scores of keys that their rows may not see to −inf. Only tiles at the ends of a row's range need it.
template <int kPairs>
__device__ __forceinline__ void hide_unseen(float (&scores)[kPairs][4], const QueryTile& tile, int packed,
                                            int group, int first_key, int window) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int position = tile.start + (packed + half * 8) / group;
        const int oldest = window > 0 ? position - window : -1;
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int key = first_key + n * 8 + j;
                if (key > position || key <= oldest) scores[n][half * 2 + j] = -INFINITY;
            }
    }
}

}  // namespace

// query, out: bf16 [rows, n_heads, kHeadDim]; k_pages, v_pages: bf16 [pages, n_kv_heads, 64, kHeadDim];
// block_table: int32 [slots, table_width]; tiles: int32 [·, 8], n_tiles: int32 [1]; window: keys a row sees, 0
// for all. Rows of out that no tile covers are not written. Grid (n_kv_heads, most tiles).
template <int kHeadDim, int kWarps, int kTilesM, int kKeys, int kMinBlocks>
__global__ void __launch_bounds__(kWarps * 32, kMinBlocks)
    attention_prefill(const bf16* __restrict__ query, const bf16* __restrict__ k_pages,
                      const bf16* __restrict__ v_pages, const int32* __restrict__ block_table,
                      const QueryTile* __restrict__ tiles, const int32* __restrict__ n_tiles,
                      bf16* __restrict__ out, int32 n_heads, int32 n_kv_heads, int32 table_width, int32 window,
                      float scale) {
    using Shape = PrefillShape<kHeadDim, kWarps, kTilesM, kKeys>;
    using Layout = TileLayout<kHeadDim>;
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    wait_for_previous_kernels();
    allow_next_kernel();
    if (blockIdx.y >= *n_tiles) return;

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int kv_head = blockIdx.x;
    const int group = n_heads / n_kv_heads;
    __shared__ QueryTile tile;  // shared, not registers: the loop has none to spare
    if (threadIdx.x == 0) tile = tiles[blockIdx.y];
    __syncthreads();
    const uint32 queries = shared_address(shared);
    const uint32 ring = queries + Shape::kQueryBytes;
    const int32* pages = block_table + int64(tile.slot) * table_width;

    const int first_position = tile.start + tile.first_packed / group;
    const int last_position =
        tile.start + min((tile.first_packed + Shape::kRows - 1) / group, tile.segment_length - 1);
    const int key_end = last_position + 1;
    const int key_begin =
        window > 0 && first_position >= window ? (first_position - window + 1) / kKeys * kKeys : 0;

    load_queries<Shape, kHeadDim>(query, tile, queries, n_heads, kv_head, group);
    load_key_tile<Shape, kHeadDim, kKeys>(k_pages, v_pages, pages, kv_head, n_kv_heads, key_begin, key_end,
                                          ring);
    copy_async_commit();

    const float unit = scale * kLog2E;
    const uint32 lane_queries =
        queries + warp * kTilesM * 16 * Layout::kRowBytes + lane_offset_rows<kHeadDim>(lane);
    const uint32 lane_keys = lane_offset_keys<kHeadDim>(lane);
    const uint32 lane_values = lane_offset_rows<kHeadDim>(lane);
    float acc[kTilesM][kHeadDim / 8][4] = {};
    OnlineSoftmax softmax[kTilesM][2];
    int stage = 0;
    for (int key0 = key_begin; key0 < key_end; key0 += kKeys) {
        copy_async_wait<0>();
        __syncthreads();
        if (key0 + kKeys < key_end)
            load_key_tile<Shape, kHeadDim, kKeys>(k_pages, v_pages, pages, kv_head, n_kv_heads, key0 + kKeys,
                                                  key_end, ring + (stage ^ 1) * 2 * Shape::kTileBytes);
        copy_async_commit();
        const uint32 keys_tile = ring + stage * 2 * Shape::kTileBytes;
        stage ^= 1;

        float scores[kTilesM][kKeys / 8][4] = {};
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
            uint32 heads[kTilesM][4];
#pragma unroll
            for (int m = 0; m < kTilesM; ++m)
                load_matrix_x4(heads[m], step_address<kHeadDim>(lane_queries, m * 16, step));
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                uint32 keys[4];
                load_matrix_x4(keys, step_address<kHeadDim>(keys_tile + lane_keys, n * 16, step));
#pragma unroll
                for (int m = 0; m < kTilesM; ++m) {
                    mma_bf16(scores[m][2 * n], heads[m], keys[0], keys[1]);
                    mma_bf16(scores[m][2 * n + 1], heads[m], keys[2], keys[3]);
                }
            }
        }
        if (key0 + kKeys - 1 > first_position || (window > 0 && key0 <= last_position - window)) {
#pragma unroll
            for (int m = 0; m < kTilesM; ++m)
                hide_unseen<kKeys / 8>(scores[m], tile,
                                       tile.first_packed + (warp * kTilesM + m) * 16 + lane / 4, group,
                                       key0 + (lane % 4) * 2, window);
        }
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) weigh(scores[m], acc[m], softmax[m], unit);
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            uint32 weights[kTilesM][4];
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) pack_weights(weights[m], scores[m], n);
#pragma unroll
            for (int pair = 0; pair < kHeadDim / 16; ++pair) {
                uint32 columns[4];
                load_matrix_x4_transposed(
                    columns, step_address<kHeadDim>(keys_tile + Shape::kTileBytes + lane_values, n * 16, pair));
#pragma unroll
                for (int m = 0; m < kTilesM; ++m) {
                    mma_bf16(acc[m][2 * pair], weights[m], columns[0], columns[1]);
                    mma_bf16(acc[m][2 * pair + 1], weights[m], columns[2], columns[3]);
                }
            }
        }
    }

    // A warp's query rows are its own: they become the place where its results are regrouped to 16-byte stores.
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
        const int row0 = (warp * kTilesM + m) * 16;
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = softmax[m][half].total();
            const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
            const int row = row0 + half * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                const uint32 both = pack_bf16(acc[m][n][half * 2] * inverse, acc[m][n][half * 2 + 1] * inverse);
                *reinterpret_cast<uint32*>(shared + Layout::offset(row, n) + (lane % 4) * 4) = both;
            }
        }
        __syncwarp();
#pragma unroll 4
        for (int i = lane; i < 16 * Layout::kChunks; i += 32) {
            const int row = row0 + i / Layout::kChunks;
            const int chunk = i % Layout::kChunks;
            const int packed = tile.first_packed + row;
            const int position = packed / group;
            if (position >= tile.segment_length) continue;
            const int64 head_row =
                int64(tile.segment_row + position) * n_heads + kv_head * group + packed % group;
            *reinterpret_cast<uint4*>(out + head_row * kHeadDim + chunk * 8) =
                *reinterpret_cast<const uint4*>(shared + Layout::offset(row, chunk));
        }
    }
}
