// Attention of ragged prompt segments over KV pages on Hopper: wgmma, with a warpgroup that only loads.
//
// The same tiles and the same answer as attention_prefill.cu, for bf16 pages on sm_90a alone; elsewhere the
// kernel is empty and never launched. A tile's 128 packed rows are two consumer warpgroups' 64 each. One
// producer warp streams whole pages, the unit of one tensor copy, through rings of keys and of values.
// A consumer starts the scores of page i + 1 before the weighted values of page i, so its softmax runs beside
// a product of its own; and the two take turns at the tensor cores (kTurns), so it runs beside the other's too.
//
// The last page of a tile may be part full, and what lies behind is noise or NaN. Such a page is copied from
// as many rows before its first as it lacks: its keys then end the tile, and zeros stand before them.
//
// Blocks stay and take tiles there and back: block b's are b, 2·blocks − 1 − b, 2·blocks + b, … Of a list
// sorted by cost each then has its share of the heavy and of the light ones.
#include "attention_prefill.cuh"
#include "attention_prefill_hopper.cuh"

using namespace slipstream;

namespace {

constexpr int kGroupThreads = 128;
constexpr int kConsumers = 2;
constexpr int kRows = 64 * kConsumers;

// A tile for one kv head, and the keys its rows see between them.
struct Item {
    QueryTile tile;
    int kv_head;
    int first_position;
    int last_position;
    int key_begin;  // a page's first
    int key_end;

    __device__ __forceinline__ int pages() const { return (key_end - key_begin + kPageSize - 1) / kPageSize; }

    // Rows by which a page's copy begins early.
    __device__ __forceinline__ int missing(int key0) const { return max(0, key0 + kPageSize - key_end); }
};

struct Work {
    const QueryTile* tiles;
    int n_items;
    int n_kv_heads;
    int group;
    int window;

    // The block's item of a round; false when there are no more.
    __device__ __forceinline__ bool take(int round, Item& item) const {
        const int blocks = gridDim.x;
        const int index = round * blocks + (round % 2 == 0 ? blockIdx.x : blocks - 1 - blockIdx.x);
        if (index >= n_items) return false;
        item.tile = tiles[index / n_kv_heads];
        item.kv_head = index % n_kv_heads;
        const QueryTile& tile = item.tile;
        item.first_position = tile.start + tile.first_packed / group;
        item.last_position =
            tile.start + min((tile.first_packed + kRows - 1) / group, tile.segment_length - 1);
        item.key_end = item.last_position + 1;
        const int oldest = window > 0 ? max(0, item.first_position - window + 1) : 0;
        item.key_begin = oldest / kPageSize * kPageSize;
        return true;
    }
};

// A place in a ring of kStages and how often it has been passed, odd or even.
template <int kStages>
struct Place {
    int stage = 0;
    uint32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Barriers of both rings, by stage: a page has arrived, a page is done with.
template <int kStages>
struct alignas(8) Barriers {
    uint64 keys_full[kStages];
    uint64 values_full[kStages];
    uint64 keys_free[kStages];
    uint64 values_free[kStages];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int kHeadDim, int kStages>
__device__ __forceinline__ void produce(const TensorMap& k_map, const TensorMap& v_map,
                                        const int32* block_table, int table_width, const Work& work,
                                        uint32 keys, uint32 values, Barriers<kStages>& barriers) {
    constexpr int kPageBytes = kPageSize * kHeadDim * 2;
    const int lane = threadIdx.x % 32;
    Place<kStages> place;
    Item item;
    for (int round = 0; work.take(round, item); ++round) {
        const int32* pages = block_table + int64(item.tile.slot) * table_width + item.key_begin / kPageSize;
        const int count = item.pages();
        int32 ahead = 0;
        for (int i = 0; i < count; ++i, place.advance()) {
            if (i % 32 == 0) ahead = i + lane < count ? pages[i + lane] : 0;
            const int page_head =
                __shfl_sync(0xffffffffu, ahead, i % 32) * work.n_kv_heads + item.kv_head;
            if (lane == 0) {
                const int first_row = -item.missing(item.key_begin + i * kPageSize);
                const uint32 keys_full = shared_address(&barriers.keys_full[place.stage]);
                const uint32 values_full = shared_address(&barriers.values_full[place.stage]);
                barrier_wait(shared_address(&barriers.keys_free[place.stage]), place.parity ^ 1);
                barrier_expect(keys_full, kPageBytes);
                copy_page(keys + place.stage * kPageBytes, k_map, first_row, page_head, keys_full);
                barrier_wait(shared_address(&barriers.values_free[place.stage]), place.parity ^ 1);
                barrier_expect(values_full, kPageBytes);
                copy_page(values + place.stage * kPageBytes, v_map, first_row, page_head, values_full);
            }
            __syncwarp();
        }
    }
}

// scores = queries · keysᵀ of a page, started.
template <int kHeadDim>
__device__ __forceinline__ void start_scores(float (&scores)[8][4], const uint32 (&queries)[kHeadDim / 16][4],
                                             uint32 keys) {
    const Matrix<16, 1024> matrix(keys);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step)
        wgmma<0>(scores, queries[step], matrix.from(step / 4 * kPageSize * 128 + step % 4 * 32), step > 0);
    wgmma_commit();
}

// acc += weights · values of a page, started.
template <int kHeadDim>
__device__ __forceinline__ void start_values(float (&acc)[kHeadDim / 8][4], const uint32 (&weights)[4][4],
                                             uint32 values) {
    const Matrix<kPageSize * 128, 1024> matrix(values);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kPageSize / 16; ++step)
        wgmma<1>(acc, weights[step], matrix.from(step * 16 * 128), 1);
    wgmma_commit();
}

template <int kHeadDim, int kStages, bool kTurns>
__device__ __forceinline__ void consume(const bf16* query, bf16* out, const Work& work, int n_heads,
                                        float unit, unsigned char* shared, uint32 keys, uint32 values,
                                        Barriers<kStages>& barriers) {
    constexpr int kPageBytes = kPageSize * kHeadDim * 2;
    constexpr int kWarpBytes = 16 * kHeadDim * 2;
    const int consumer = threadIdx.x / kGroupThreads - 1;
    const int warp = threadIdx.x / 32 - kGroupThreads / 32;
    const int lane = threadIdx.x % 32;
    unsigned char* results = shared + kConsumers * 4 * kWarpBytes + warp * kWarpBytes;
    const uint32 queries = shared_address(shared) + warp * kWarpBytes;
    const int group = work.group;
    Place<kStages> key_place, value_place;
    Item item, next;
    const auto fetch = [&](const Item& of) {
        load_queries<kHeadDim, 16, 32>(query, of.tile, queries, of.tile.first_packed + warp * 16, lane, n_heads,
                                       of.kv_head, group);
    };
    const auto wait_turn = [&] {
        if (kTurns) asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory");
    };
    const auto end_turn = [&] {
        if (kTurns) asm volatile("bar.arrive %0, 256;" ::"r"(2 - consumer) : "memory");
    };

    bool more = work.take(0, item);
    if (more) fetch(item);
    copy_async_commit();
    if (consumer == 1) end_turn();
    for (int round = 1; more; ++round) {
        uint32 heads[kHeadDim / 16][4];
        copy_async_wait<0>();
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step)
            load_matrix_x4(heads[step],
                           step_address<kHeadDim>(queries + lane_offset_rows<kHeadDim>(lane), 0, step));
        __syncwarp();

        float acc[kHeadDim / 8][4] = {};
        float scores[8][4];
        uint32 weights[4][4];
        float factors[2];
        OnlineSoftmax softmax[2];
        const int packed = item.tile.first_packed + warp * 16 + lane / 4;
        const auto weigh_page = [&](int key0) {
            if (key0 + kPageSize - 1 > item.first_position ||
                (work.window > 0 && key0 <= item.last_position - work.window))
                hide_unseen<8>(scores, item.tile.start, packed, group,
                               key0 - item.missing(key0) + lane % 4 * 2, work.window, key0);
            raise_rows(scores, softmax, unit, factors);
            weigh_scores(scores, softmax, unit);
        };
        const auto release = [&](uint64& barrier) {
            if (lane == 0) barrier_arrive(shared_address(&barrier));
        };

        barrier_wait(shared_address(&barriers.keys_full[key_place.stage]), key_place.parity);
        start_scores<kHeadDim>(scores, heads, keys + key_place.stage * kPageBytes);
        more = work.take(round, next);
        if (more) fetch(next);
        copy_async_commit();
        wgmma_wait<0>();
        hold(scores);
        release(barriers.keys_free[key_place.stage]);
        key_place.advance();
        weigh_page(item.key_begin);
#pragma unroll
        for (int n = 0; n < 4; ++n) pack_weights(weights[n], scores, n);

        for (int key0 = item.key_begin + kPageSize; key0 < item.key_end; key0 += kPageSize) {
            barrier_wait(shared_address(&barriers.keys_full[key_place.stage]), key_place.parity);
            wait_turn();
            start_scores<kHeadDim>(scores, heads, keys + key_place.stage * kPageBytes);
            barrier_wait(shared_address(&barriers.values_full[value_place.stage]), value_place.parity);
            start_values<kHeadDim>(acc, weights, values + value_place.stage * kPageBytes);
            end_turn();
            wgmma_wait<1>();
            hold(scores);
            release(barriers.keys_free[key_place.stage]);
            key_place.advance();
            weigh_page(key0);
            wgmma_wait<0>();
            hold(acc);
            hold(weights);
            release(barriers.values_free[value_place.stage]);
            value_place.advance();
            rescale(acc, factors);
#pragma unroll
            for (int n = 0; n < 4; ++n) pack_weights(weights[n], scores, n);
        }
        barrier_wait(shared_address(&barriers.values_full[value_place.stage]), value_place.parity);
        start_values<kHeadDim>(acc, weights, values + value_place.stage * kPageBytes);
        wgmma_wait<0>();
        hold(acc);
        hold(weights);
        release(barriers.values_free[value_place.stage]);
        value_place.advance();

        place_rows<kHeadDim>(results, lane, acc, softmax);
        __syncwarp();
        store_rows<kHeadDim>(out, item.tile, results, item.tile.first_packed + warp * 16, lane, n_heads,
                             item.kv_head, group);
        __syncwarp();
        item = next;
    }
}

#endif

}  // namespace

// query, out: bf16 [rows, n_heads, kHeadDim]; k_map, v_map: pages of bf16 [pages · n_kv_heads, 64, kHeadDim] by
// 64 columns; block_table: int32 [slots, table_width]; tiles: int32 [·, 8], n_tiles: int32 [1]; window: keys a
// row sees, 0 for all. Rows of out that no tile covers are not written. Grid: any number of blocks. Dynamic
// shared memory: kStages pages of keys, as many of values, the queries, the results.
template <int kHeadDim, int kStages, bool kTurns>
__global__ void __launch_bounds__((kConsumers + 1) * kGroupThreads, 1)
    attention_prefill_wgmma(const bf16* __restrict__ query, const __grid_constant__ TensorMap k_map,
                            const __grid_constant__ TensorMap v_map, const int32* __restrict__ block_table,
                            const QueryTile* __restrict__ tiles, const int32* __restrict__ n_tiles,
                            bf16* __restrict__ out, int32 n_heads, int32 n_kv_heads, int32 table_width,
                            int32 window, float scale) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int kPageBytes = kPageSize * kHeadDim * 2;
    constexpr int kConsumerWarps = kConsumers * kGroupThreads / 32;
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    __shared__ Barriers<kStages> barriers;
    if (threadIdx.x == 0) {
        prefetch_map(k_map);
        prefetch_map(v_map);
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(shared_address(&barriers.keys_full[stage]), 1);
            barrier_init(shared_address(&barriers.values_full[stage]), 1);
            barrier_init(shared_address(&barriers.keys_free[stage]), kConsumerWarps);
            barrier_init(shared_address(&barriers.values_free[stage]), kConsumerWarps);
        }
        fence_barriers();
    }
    __syncthreads();
    wait_for_previous_kernels();
    allow_next_kernel();
    const Work work{tiles, *n_tiles * n_kv_heads, n_kv_heads, n_heads / n_kv_heads, window};
    const uint32 keys = shared_address(shared);
    const uint32 values = keys + kStages * kPageBytes;
    // Both together are what 384 threads of 168 have: with one register more a consumer waits forever.
    if (threadIdx.x < kGroupThreads) {
        give_registers<24>();
        if (threadIdx.x < 32)
            produce<kHeadDim, kStages>(k_map, v_map, block_table, table_width, work, keys, values, barriers);
    } else {
        take_registers<240>();
        consume<kHeadDim, kStages, kTurns>(query, out, work, n_heads, scale * kLog2E,
                                           shared + 2 * kStages * kPageBytes, keys, values, barriers);
    }
#endif
}
