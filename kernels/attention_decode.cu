// Attention of one query row per sequence over its KV pages: split-K, tensor cores, deterministic merge.
//
// Bound by memory: every key and value of the context is read once. So the query heads that share a kv
// head form one 16-row mma tile; each warp streams its own key tiles through a ring of cp.async stages that
// runs on across work items, so the pipe never drains; and the grid, fixed for graphs, strides over a list of
// splits that follows the live contexts.
//
// How a sequence is split depends on its own length alone, so its result does not change with the batch.
// The block that finishes a row's last split merges all of them in order: no float atomics.
#include "attention.cuh"
#include "reduce.cuh"

using namespace slipstream;

namespace {

constexpr int kGroupMax = 16;  // query heads per kv head: one mma tile
constexpr int kMergePad = 8;   // floats; keeps the merge's rows in different banks

// One stretch of one row's keys. Written by plan_decode, read by attention_decode.
struct alignas(16) Split {
    int32 row;
    int32 slot;
    int32 key_begin;   // multiple of 64
    int32 key_end;
    int32 window_begin;  // first key that the row sees
    int32 index;       // among the row's splits
    int32 count;       // of the row's splits
    int32 unused;
};

struct Plan {
    int32 n_splits;
    int32 unused[7];
    Split splits[1];
};

}  // namespace

// Lists the splits of all rows. row_slot: int32 [rows], −1 for padding; a row without an active slot gets one
// empty split, which makes its output zeros. window: keys a row sees, 0 for all. plan: int32
// [8 + 8·rows·max_splits]. One block of at least `rows` threads, a multiple of 32.
__global__ void __launch_bounds__(1024)
    plan_decode(const int32* __restrict__ row_slot, const int32* __restrict__ slot_position,
                const int32* __restrict__ slot_active, Plan* __restrict__ plan, int32 rows, int32 window,
                int32 min_pages, int32 max_splits) {
    __shared__ int32 warp_totals[32];
    allow_next_kernel();
    wait_for_previous_kernels();
    const int row = threadIdx.x;
    const int32 slot = row < rows ? row_slot[row] : -1;
    const int32 context = slot >= 0 && slot_active[slot] ? slot_position[slot] + 1 : 0;
    const int32 window_begin = window > 0 && context > window ? context - window : 0;
    const int32 first_page = window_begin / kPageSize;
    const int32 pages = (context + kPageSize - 1) / kPageSize - first_page;
    const int32 each = max(min_pages, (pages + max_splits - 1) / max_splits);
    const int32 count = row < rows ? max(1, (pages + each - 1) / each) : 0;

    int32 before = count;  // inclusive scan over the block
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int32 left = __shfl_up_sync(0xffffffffu, before, offset);
        if (threadIdx.x % 32 >= offset) before += left;
    }
    if (threadIdx.x % 32 == 31) warp_totals[threadIdx.x / 32] = before;
    __syncthreads();
    for (int warp = 0; warp < threadIdx.x / 32; ++warp) before += warp_totals[warp];
    if (threadIdx.x == blockDim.x - 1) plan->n_splits = before;
    for (int i = 0; i < count; ++i) {
        const int32 begin = (first_page + i * each) * kPageSize;
        const int32 end = min(begin + each * kPageSize, context);
        plan->splits[before - count + i] = Split{row, slot, begin, end, window_begin, i, count, 0};
    }
}

namespace {

// The key tiles of one warp over all items of its block, in order: what to load next.
template <int kHeadDim, int kKeys, int kWarps>
struct TileStream {
    const Plan* plan;
    const int32* block_table;
    int32 table_width;
    int32 n_kv_heads;
    int32 n_items;
    int32 item;
    int32 kv_head;
    int32 slot;
    int32 key;      // of the tile's first row; in range while item < n_items
    int32 key_end;
    int32 page;

    __device__ __forceinline__ void open(int warp) {  // finds the first item from `item` on that has a tile for us
        while (item < n_items) {
            const Split& split = plan->splits[item / n_kv_heads];
            key = split.key_begin + warp * kKeys;
            key_end = split.key_end;
            slot = split.slot;
            kv_head = item % n_kv_heads;
            if (key < key_end) {
                fetch_page();
                return;
            }
            item += gridDim.x;
        }
    }

    __device__ __forceinline__ void fetch_page() { page = block_table[int64(slot) * table_width + key / kPageSize]; }

    __device__ __forceinline__ void advance(int warp) {
        key += kWarps * kKeys;
        if (key < key_end) {
            fetch_page();
            return;
        }
        item += gridDim.x;
        open(warp);
    }

    // Starts the copy of the current tile's keys and values. Values past the context become 0: whatever the
    // page holds there must not reach 0 · value.
    __device__ __forceinline__ void load(const bf16* k_pages, const bf16* v_pages, uint32 stage, int lane) const {
        if (item >= n_items) return;
        using Layout = TileLayout<kHeadDim>;
        const int64 base = ((int64(page) * n_kv_heads + kv_head) * kPageSize + key % kPageSize) * kHeadDim;
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

// Query heads of one row and kv head as A operands; heads past the group are zeros.
template <int kHeadDim>
__device__ __forceinline__ void load_query(uint32 (&out)[kHeadDim / 16][4], const bf16* heads, int group, int lane) {
    const int row = lane / 4;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        const int column = step * 16 + (lane % 4) * 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int r = row + (j & 1) * 8;
            const bf16* source = heads + r * kHeadDim + column + (j / 2) * 8;
            out[step][j] = r < group ? *reinterpret_cast<const uint32*>(source) : 0u;
        }
    }
}

// Adds the keys key0 … of one stage that lie in key_begin … key_end − 1.
template <int kHeadDim, int kKeys, bool kSoftcap>
__device__ __forceinline__ void attend_tile(Accumulator<kHeadDim>& acc, const uint32 (&query)[kHeadDim / 16][4],
                                            uint32 stage, int key0, int key_begin, int key_end, float scale,
                                            float softcap, int lane) {
    float scores[kKeys / 8][4] = {};
    const uint32 lane_keys = stage + lane_offset_keys<kHeadDim>(lane);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            uint32 keys[4];
            load_matrix_x4(keys, step_address<kHeadDim>(lane_keys, n * 16, step));
            mma_bf16(scores[2 * n], query[step], keys[0], keys[1]);
            mma_bf16(scores[2 * n + 1], query[step], keys[2], keys[3]);
        }
    }
    const bool whole = key0 >= key_begin && key0 + kKeys <= key_end;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int key = key0 + n * 8 + (lane % 4) * 2 + (j & 1);
            const bool seen = whole || (key >= key_begin && key < key_end);
            scores[n][j] = seen ? capped<kSoftcap>(scores[n][j], scale, softcap) : -INFINITY;
        }
    }
    weigh(scores, acc.out, acc.rows, score_unit<kSoftcap>(scale));
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

    __device__ __forceinline__ void put(const Accumulator<kHeadDim>& acc, float unit, int warp, int lane) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = acc.rows[half].total();
            const int row = lane / 4 + half * 8;
            if (row >= group) continue;
            if (lane % 4 == 0) totals[warp * kGroupMax + row] = make_float2(acc.rows[half].maximum * unit, sum);
            float* target = out + (warp * group + row) * kStride + (lane % 4) * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                *reinterpret_cast<float2*>(target + n * 8) = make_float2(acc.out[n][half * 2], acc.out[n][half * 2 + 1]);
        }
    }
};

// Weighted sum of `count` partial results, read in order: values(i) are four columns, totals(i) their row's
// maximum and sum. Returns the merged maximum and sum; `merged` is not yet divided by the sum.
template <typename Values, typename Totals>
__device__ __forceinline__ float2 merge_parts(float4& merged, int count, Values values, Totals totals) {
    float maximum = -INFINITY;
    for (int i = 0; i < count; ++i) maximum = fmaxf(maximum, totals(i).x);
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    float sum = 0.0f;
    merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
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
    *reinterpret_cast<uint2*>(target) =
        make_uint2(pack_bf16(value.x * inverse, value.y * inverse), pack_bf16(value.z * inverse, value.w * inverse));
}

}  // namespace

// query, out: bf16 [rows, n_heads, kHeadDim]; k_pages, v_pages: bf16 [pages, n_kv_heads, 64, kHeadDim];
// block_table: int32 [slots, table_width]. partial_out: float32 [splits, n_heads, kHeadDim]; partial_totals:
// float2 [splits, n_heads]; arrivals: int32 [rows, n_kv_heads], zero before the first launch and after each.
// Grid: any number of blocks. Dynamic shared memory: kWarps·kStages stages, then the merge's rows.
template <int kHeadDim, int kKeys, int kWarps, int kStages, bool kSoftcap>
__global__ void __launch_bounds__(kWarps * 32, 1)
    attention_decode(const bf16* __restrict__ query, const bf16* __restrict__ k_pages, const bf16* __restrict__ v_pages,
                     const int32* __restrict__ block_table, const Plan* __restrict__ plan, float* __restrict__ partial_out,
                     float2* __restrict__ partial_totals, int32* __restrict__ arrivals, bf16* __restrict__ out,
                     int32 n_heads, int32 n_kv_heads, int32 table_width, float scale, float softcap) {
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    __shared__ float2 warp_totals[kWarps * kGroupMax];
    __shared__ int32 is_last;
    constexpr int kStageBytes = 2 * kKeys * kHeadDim * 2;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int group = n_heads / n_kv_heads;
    const uint32 ring = shared_address(shared) + warp * kStages * kStageBytes;
    const Merge<kHeadDim, kWarps> merge{reinterpret_cast<float*>(shared + kWarps * kStages * kStageBytes), warp_totals,
                                        group};
    allow_next_kernel();
    wait_for_previous_kernels();

    const int32 n_items = plan->n_splits * n_kv_heads;
    TileStream<kHeadDim, kKeys, kWarps> stream{plan, block_table, table_width, n_kv_heads, n_items, int32(blockIdx.x)};
    stream.open(warp);
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        stream.load(k_pages, v_pages, ring + i * kStageBytes, lane);
        copy_async_commit();
        stream.advance(warp);
    }
    int read_stage = 0;
    int write_stage = kStages - 1;
    for (int32 item = blockIdx.x; item < n_items; item += gridDim.x) {
        const Split split = plan->splits[item / n_kv_heads];
        const int kv_head = item % n_kv_heads;
        const int64 first_head = int64(split.row) * n_heads + kv_head * group;
        Accumulator<kHeadDim> acc;
        acc.reset();
        if (split.key_begin + warp * kKeys < split.key_end) {
            uint32 heads[kHeadDim / 16][4];
            load_query<kHeadDim>(heads, query + first_head * kHeadDim, group, lane);
            for (int key = split.key_begin + warp * kKeys; key < split.key_end; key += kWarps * kKeys) {
                copy_async_wait<kStages - 2>();
                __syncwarp();  // also: everyone is done with the stage that is refilled now
                stream.load(k_pages, v_pages, ring + write_stage * kStageBytes, lane);
                copy_async_commit();
                stream.advance(warp);
                attend_tile<kHeadDim, kKeys, kSoftcap>(acc, heads, ring + read_stage * kStageBytes, key, split.window_begin,
                                             split.key_end, scale, softcap, lane);
                write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
                read_stage = read_stage + 1 == kStages ? 0 : read_stage + 1;
            }
        }
        merge.put(acc, score_unit<kSoftcap>(scale), warp, lane);
        __syncthreads();
        const int64 part_row = int64(item / n_kv_heads) * n_heads + kv_head * group;
        for (int i = threadIdx.x * 4; i < group * kHeadDim; i += kWarps * 32 * 4) {
            const int head = i / kHeadDim;
            const int column = i % kHeadDim;
            float4 merged;
            const float2 totals = merge_parts(
                merged, kWarps,
                [&](int w) { return *reinterpret_cast<const float4*>(merge.out + (w * group + head) * merge.kStride + column); },
                [&](int w) { return warp_totals[w * kGroupMax + head]; });
            if (split.count == 1) {
                store_quotient(out + (first_head + head) * kHeadDim + column, merged, totals.y);
            } else {
                *reinterpret_cast<float4*>(partial_out + (part_row + head) * kHeadDim + column) = merged;
                if (column == 0) partial_totals[part_row + head] = totals;
            }
        }
        if (split.count > 1) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                int32* counter = arrivals + int64(split.row) * n_kv_heads + kv_head;
                is_last = atomicAdd(counter, 1) == split.count - 1;
                if (is_last) *counter = 0;
            }
            __syncthreads();
            if (is_last) {
                __threadfence();
                const int64 first_part = part_row - int64(split.index) * n_heads;
                for (int i = threadIdx.x * 4; i < group * kHeadDim; i += kWarps * 32 * 4) {
                    const int head = i / kHeadDim;
                    const int column = i % kHeadDim;
                    const int64 part = first_part + head;
                    float4 merged;
                    const float2 totals = merge_parts(
                        merged, split.count,
                        [&](int s) {
                            return __ldcg(reinterpret_cast<const float4*>(partial_out + (part + int64(s) * n_heads) * kHeadDim + column));
                        },
                        [&](int s) { return __ldcg(partial_totals + part + int64(s) * n_heads); });
                    store_quotient(out + (first_head + head) * kHeadDim + column, merged, totals.y);
                }
            }
        }
        __syncthreads();
    }
    copy_async_wait<0>();
}
