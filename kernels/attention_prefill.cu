// Attention of ragged prompt segments over KV pages: causal, with windows, on mma.sync tensor cores.
//
// Bound by arithmetic. The query heads that share a kv head share a tile: packed row i of a segment is head
// i % group at position i / group, so K and V are read once for all of them. Each warp owns 16·kTilesM rows;
// key tiles alternate between two shared stages, the next one loading while this one is used.
//
// A block takes 3 µs for 64 keys of 128 rows however few share its multiprocessor, so the longest tile of one
// 2,048-token segment alone takes 96 µs. Where tiles are few, two parts of a block therefore share a tile's
// keys, every other one each, and merge their sums at the end.
//
// Keys of the segment itself are in the pages already (rope_and_write), so prefix and chunk are one loop.
#include "attention_prefill.cuh"
#include "attention_prefill_ring.cuh"

using namespace slipstream;

namespace {

// scores = queries · keysᵀ of one key tile. All addresses are a lane's.
template <int kHeadDim, int kTilesM, int kKeys>
__device__ __forceinline__ void score_keys(float (&scores)[kTilesM][kKeys / 8][4], uint32 lane_queries,
                                           uint32 lane_keys) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32 heads[kTilesM][4];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m)
            load_matrix_x4(heads[m], step_address<kHeadDim>(lane_queries, m * 16, step));
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            uint32 keys[4];
            load_matrix_x4(keys, step_address<kHeadDim>(lane_keys, n * 16, step));
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
                mma_bf16(scores[m][2 * n], heads[m], keys[0], keys[1]);
                mma_bf16(scores[m][2 * n + 1], heads[m], keys[2], keys[3]);
            }
        }
    }
}

// acc += weights · values of one key tile.
template <int kHeadDim, int kTilesM, int kKeys>
__device__ __forceinline__ void add_values(float (&acc)[kTilesM][kHeadDim / 8][4],
                                           const float (&weights)[kTilesM][kKeys / 8][4],
                                           uint32 lane_values) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
        uint32 packed[kTilesM][4];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) pack_weights(packed[m], weights[m], n);
#pragma unroll
        for (int pair = 0; pair < kHeadDim / 16; ++pair) {
            uint32 columns[4];
            load_matrix_x4_transposed(columns, step_address<kHeadDim>(lane_values, n * 16, pair));
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
                mma_bf16(acc[m][2 * pair], packed[m], columns[0], columns[1]);
                mma_bf16(acc[m][2 * pair + 1], packed[m], columns[2], columns[3]);
            }
        }
    }
}

}  // namespace

// query, out: bf16 [rows, n_heads, kHeadDim]; k_pages, v_pages: Element [pages, n_kv_heads, 64, kHeadDim], with
// e4m3 also k_scales, v_scales: float32 [pages, n_kv_heads]; block_table: int32 [slots, table_width]; tiles:
// int32 [·, 8], n_tiles: int32 [1]; window: keys a row sees, 0 for all. Rows of out that no tile covers are
// not written. Grid (n_kv_heads, most tiles). Dynamic shared memory: the query tile, a ring for each part.
template <int kHeadDim, int kWarps, int kTilesM, int kKeys, int kMinBlocks, int kParts, typename Element>
__global__ void __launch_bounds__(kWarps * kParts * 32, kMinBlocks)
    attention_prefill(const bf16* __restrict__ query, const Element* __restrict__ k_pages,
                      const Element* __restrict__ v_pages, const float* __restrict__ k_scales,
                      const float* __restrict__ v_scales, const int32* __restrict__ block_table,
                      const QueryTile* __restrict__ tiles, const int32* __restrict__ n_tiles,
                      bf16* __restrict__ out, int32 n_heads, int32 n_kv_heads, int32 table_width, int32 window,
                      float scale) {
    constexpr int kRows = kWarps * kTilesM * 16;
    constexpr int kPartThreads = kWarps * 32;
    using Layout = TileLayout<kHeadDim>;
    using Ring = KeyRing<Element, kHeadDim, kKeys, kPartThreads>;
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    __shared__ float page_scales[kParts][2][2];
    wait_for_previous_kernels();
    allow_next_kernel();
    if (blockIdx.y >= *n_tiles) return;

    const int part = kParts == 1 ? 0 : threadIdx.x / kPartThreads;
    const int thread = kParts == 1 ? threadIdx.x : threadIdx.x % kPartThreads;
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int kv_head = blockIdx.x;
    const int group = n_heads / n_kv_heads;
    __shared__ QueryTile tile;  // shared, not registers: the loop has none to spare
    if (threadIdx.x == 0) tile = tiles[blockIdx.y];
    __syncthreads();
    const uint32 queries = shared_address(shared);
    const Ring ring{queries + kRows * Layout::kRowBytes + part * Ring::kBytes,
                    shared_address(page_scales[part])};
    const PageRows<Element> pages{k_pages,  v_pages, k_scales,
                                  v_scales, block_table + int64(tile.slot) * table_width,
                                  kv_head,  n_kv_heads};

    const int first_position = tile.start + tile.first_packed / group;
    const int last_position =
        tile.start + min((tile.first_packed + kRows - 1) / group, tile.segment_length - 1);
    const int key_end = last_position + 1;
    const int key_begin =
        (window > 0 && first_position >= window ? (first_position - window + 1) / kKeys * kKeys : 0) +
        part * kKeys;

    load_queries<kHeadDim, kRows, kPartThreads * kParts>(query, tile, queries, tile.first_packed, threadIdx.x,
                                                         n_heads, kv_head, group);
    if (kParts == 1 || key_begin < key_end) ring.load(pages, key_begin, key_end, 0, thread);
    copy_async_commit();
    if constexpr (kParts > 1) {
        copy_async_wait<0>();
        __syncthreads();
    }

    const float unit = scale * kLog2E;
    const uint32 lane_queries =
        queries + warp * kTilesM * 16 * Layout::kRowBytes + lane_offset_rows<kHeadDim>(lane);
    const uint32 lane_keys = lane_offset_keys<kHeadDim>(lane);
    const uint32 lane_values = Ring::kTileBytes + lane_offset_rows<kHeadDim>(lane);
    float acc[kTilesM][kHeadDim / 8][4] = {};
    OnlineSoftmax softmax[kTilesM][2];
    int stage = 0;
    for (int key0 = key_begin; key0 < key_end; key0 += kParts * kKeys) {
        copy_async_wait<0>();
        part_sync<kPartThreads>(part);
        const int next = key0 + kParts * kKeys;
        if (next < key_end) ring.load(pages, next, key_end, stage ^ 1, thread);
        copy_async_commit();
        const uint32 keys_tile = ring.tile(stage, part, thread);
        stage ^= 1;

        float scores[kTilesM][kKeys / 8][4] = {};
        score_keys<kHeadDim, kTilesM, kKeys>(scores, lane_queries, keys_tile + lane_keys);
        if (key0 + kKeys - 1 > first_position || (window > 0 && key0 <= last_position - window)) {
#pragma unroll
            for (int m = 0; m < kTilesM; ++m)
                hide_unseen<kKeys / 8>(scores[m], tile.start,
                                       tile.first_packed + (warp * kTilesM + m) * 16 + lane / 4, group,
                                       key0 + (lane % 4) * 2, window);
        }
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) weigh(scores[m], acc[m], softmax[m], unit);
        add_values<kHeadDim, kTilesM, kKeys>(acc, scores, keys_tile + lane_values);
    }
    if constexpr (kParts > 1) {
        merge_parts<kTilesM, kHeadDim / 8, kPartThreads>(acc, softmax, shared + kRows * Layout::kRowBytes,
                                                         part, thread, unit);
        if (part > 0) return;
    }

    // A warp's query rows are its own: they become the place where its results are regrouped to 16-byte stores.
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
        const int row0 = (warp * kTilesM + m) * 16;
        unsigned char* rows = shared + row0 * Layout::kRowBytes;
        __syncwarp();
        place_rows<kHeadDim>(rows, lane, acc[m], softmax[m]);
        __syncwarp();
        store_rows<kHeadDim>(out, tile, rows, tile.first_packed + row0, lane, n_heads, kv_head, group);
    }
}
