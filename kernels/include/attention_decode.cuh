// The parts of decode attention: the list of work, a warp's stream of key tiles, the tile's arithmetic,
// merging.
#pragma once

#include "attention.cuh"

namespace slipstream {

constexpr int kGroupMax = 16;  // query heads per kv head: one mma tile
constexpr int kMergePad = 8;   // floats; keeps the merge's rows in different banks

// One stretch of one row's keys. Written by plan_decode, read by attention_decode.
struct alignas(16) Split {
    int32 row;
    int32 slot;
    int32 key_begin;  // multiple of 64
    int32 key_end;
    int32 window_begin;  // first key that the row sees
    int32 index;         // among the row's splits
    int32 count;         // of the row's splits
    int32 unused;
};

// A row's splits in the list.
struct RowSplits {
    int32 first;
    int32 count;
};

// The key tiles of one warp over all items of its block, in order: what to load next.
template <int kHeadDim, int kKeys, int kWarps>
struct TileStream {
    const Split* splits;
    const int32* block_table;
    int32 table_width;
    int32 n_kv_heads;
    int32 n_items;
    int32 item;
    int32 key;  // of the tile's first row; in range while item < n_items
    int32 key_end;
    int32 slot;
    int32 page;
    int32 next_slot;  // of the block's next item, fetched while this one streams
    int32 next_begin;
    int32 next_end;

    __device__ __forceinline__ void fetch_page() {
        page = block_table[int64(slot) * table_width + key / kPageSize];
    }

    __device__ __forceinline__ void fetch_next() {
        if (item + int32(gridDim.x) >= n_items) return;
        const Split& split = splits[(item + gridDim.x) / n_kv_heads];
        next_slot = split.slot;
        next_begin = split.key_begin;
        next_end = split.key_end;
    }

    __device__ __forceinline__ void start(int warp) {  // at item blockIdx.x
        item = int32(blockIdx.x) - int32(gridDim.x);
        fetch_next();
        move_on(warp);
    }

    __device__ __forceinline__ void move_on(int warp) {  // to the next item that has a tile for this warp
        do {
            item += gridDim.x;
            slot = next_slot;
            key = next_begin + warp * kKeys;
            key_end = next_end;
            fetch_next();
        } while (item < n_items && key >= key_end);
        if (item < n_items) fetch_page();
    }

    __device__ __forceinline__ void advance(int warp) {
        if (item >= n_items) return;
        key += kWarps * kKeys;
        if (key < key_end)
            fetch_page();
        else
            move_on(warp);
    }

    // Starts the copy of the current tile's keys and values. Values past the context become 0: whatever the
    // page holds there must not reach 0 · value.
    __device__ __forceinline__ void load(const bf16* k_pages, const bf16* v_pages, uint32 stage,
                                         int lane) const {
        if (item >= n_items) return;
        using Layout = TileLayout<kHeadDim>;
        const int64 base =
            ((int64(page) * n_kv_heads + item % n_kv_heads) * kPageSize + key % kPageSize) * kHeadDim;
#pragma unroll
        for (int i = 0; i < kKeys * Layout::kChunks / 32; ++i) {
            const int chunk = i * 32 + lane;
            const int row = chunk / Layout::kChunks;
            const int column = chunk % Layout::kChunks;
            const bool valid = key + row < key_end;
            const uint32 target = stage + Layout::offset(row, column);
            copy_async_16(target, k_pages + base + chunk * 8, valid);
            copy_async_16(target + kKeys * Layout::kRowBytes, v_pages + base + chunk * 8, valid);
        }
    }
};

// One warp's running result for a 16-row tile of query heads.
template <int kHeadDim>
struct Accumulator {
    float out[kHeadDim / 8][4];
    OnlineSoftmax rows[2];  // rows lane/4 and lane/4 + 8

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) out[n][j] = 0.0f;
        rows[0] = OnlineSoftmax{};
        rows[1] = OnlineSoftmax{};
    }
};

// The queries of an item on their way from global to shared memory: [8 or 16][kHeadDim], swizzled.
template <int kHeadDim, int kThreads>
struct QueryFetch {
    static constexpr int kEach = kGroupMax * TileLayout<kHeadDim>::kChunks / kThreads;
    uint4 parts[kEach];

    __device__ __forceinline__ void start(const bf16* heads, int group) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int chunk = i * kThreads + threadIdx.x;
            if (chunk < group * TileLayout<kHeadDim>::kChunks)
                parts[i] = reinterpret_cast<const uint4*>(heads)[chunk];
        }
    }

    __device__ __forceinline__ void finish(unsigned char* target, int group) const {
        using Layout = TileLayout<kHeadDim>;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int chunk = i * kThreads + threadIdx.x;
            if (chunk < group * Layout::kChunks)
                *reinterpret_cast<uint4*>(
                    target + Layout::offset(chunk / Layout::kChunks, chunk % Layout::kChunks)) = parts[i];
        }
    }
};

// Adds the keys key0 … of one stage that lie in key_begin … key_end − 1.
template <int kHeadDim, int kKeys>
__device__ __forceinline__ void attend_tile(Accumulator<kHeadDim>& acc, uint32 lane_queries, uint32 stage,
                                            int key0, int key_begin, int key_end, float scale, int lane) {
    float scores[kKeys / 8][4] = {};
    float others[kKeys / 8][4] = {};  // odd steps: two chains of products halve the wait for each
    const uint32 lane_keys = stage + lane_offset_keys<kHeadDim>(lane);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32 heads[4];
        load_matrix_x4(heads, step_address<kHeadDim>(lane_queries, 0, step));
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            uint32 keys[4];
            load_matrix_x4(keys, step_address<kHeadDim>(lane_keys, n * 16, step));
            mma_bf16(step % 2 ? others[2 * n] : scores[2 * n], heads, keys[0], keys[1]);
            mma_bf16(step % 2 ? others[2 * n + 1] : scores[2 * n + 1], heads, keys[2], keys[3]);
        }
    }
    const bool whole = key0 >= key_begin && key0 + kKeys <= key_end;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int key = key0 + n * 8 + (lane % 4) * 2 + (j & 1);
            const bool seen = whole || (key >= key_begin && key < key_end);
            scores[n][j] = seen ? scores[n][j] + others[n][j] : -INFINITY;
        }
    }
    weigh(scores, acc.out, acc.rows, scale * kLog2E);
    const uint32 lane_values = stage + kKeys * kHeadDim * 2 + lane_offset_rows<kHeadDim>(lane);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
        uint32 weights[4];
        pack_weights(weights, scores, n);
#pragma unroll
        for (int pair = 0; pair < kHeadDim / 16; ++pair) {
            uint32 columns[4];
            load_matrix_x4_transposed(columns, step_address<kHeadDim>(lane_values, n * 16, pair));
            mma_bf16(acc.out[2 * pair], weights, columns[0], columns[1]);
            mma_bf16(acc.out[2 * pair + 1], weights, columns[2], columns[3]);
        }
    }
}

// Results of the warps of a block, or of the splits of a row, weighted by their maxima.
template <int kHeadDim, int kWarps>
struct Merge {
    static constexpr int kStride = kHeadDim + kMergePad;
    float* out;      // shared [kWarps][group][kStride]
    float2* totals;  // shared [kWarps][kGroupMax]: maximum, sum
    int group;

    __device__ __forceinline__ void put(const Accumulator<kHeadDim>& acc, float unit, int warp,
                                        int lane) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = acc.rows[half].total();
            const int row = lane / 4 + half * 8;
            if (row >= group) continue;
            if (lane % 4 == 0) totals[warp * kGroupMax + row] = make_float2(acc.rows[half].maximum * unit, sum);
            float* target = out + (warp * group + row) * kStride + (lane % 4) * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                *reinterpret_cast<float2*>(target + n * 8) =
                    make_float2(acc.out[n][half * 2], acc.out[n][half * 2 + 1]);
        }
    }
};

// Weighted sum of `count` partial results, read in order: values(i) are four columns, totals(i) their row's
// maximum and sum. Returns the merged maximum and sum; `merged` is not yet divided by the sum.
template <int kUnroll, typename Values, typename Totals>
__device__ __forceinline__ float2 merge_parts(float4& merged, int count, Values values, Totals totals) {
    float maximum = -INFINITY;
#pragma unroll kUnroll
    for (int i = 0; i < count; ++i) maximum = fmaxf(maximum, totals(i).x);
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    float sum = 0.0f;
    merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll kUnroll
    for (int i = 0; i < count; ++i) {
        const float2 part = totals(i);
        const float4 value = values(i);
        const float weight = exp2_fast(part.x - base);
        sum += weight * part.y;
        merged.x += weight * value.x;
        merged.y += weight * value.y;
        merged.z += weight * value.z;
        merged.w += weight * value.w;
    }
    return make_float2(maximum, sum);
}

__device__ __forceinline__ void store_quotient(bf16* target, float4 value, float sum) {
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    *reinterpret_cast<uint2*>(target) = make_uint2(pack_bf16(value.x * inverse, value.y * inverse),
                                                   pack_bf16(value.z * inverse, value.w * inverse));
}

}  // namespace slipstream
