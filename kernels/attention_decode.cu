// Attention of one query row per sequence over its KV pages: split-K, tensor cores, deterministic merge.
//
// Bound by memory: every key and value of the context is read once. So the query heads that share a kv
// head form one 16-row mma tile; each warp streams its own key tiles through a ring of cp.async stages that
// runs on across work items, so the pipe never drains; and the grid, fixed for graphs, strides over a list of
// splits that follows the live contexts. What the next item needs (its place, its queries) is fetched while
// this one is computed: waiting for it, and for a fence and an atomic at each item's end, cost 11 µs an item.
//
// How a sequence is split depends on its own length alone, so its result does not change with the batch.
// Rows of more than one split are merged by a launch of their own, in the order of the splits.
#include "attention_decode.cuh"
#include "ptx.cuh"

using namespace slipstream;

namespace {

constexpr int kMergeWarps = 4;

}  // namespace

// Lists the splits of all rows. row_slot: int32 [rows], −1 for padding; a row without an active slot gets one
// empty split, which makes its output zeros. window: keys a row sees, 0 for all. splits: Split
// [rows·max_splits]; row_splits: RowSplits [rows]; n_splits: int32 [1]. One block of at least `rows` threads, a
// multiple of 32.
__global__ void __launch_bounds__(1024)
    plan_decode(const int32* __restrict__ row_slot, const int32* __restrict__ slot_position,
                const int32* __restrict__ slot_active, Split* __restrict__ splits,
                RowSplits* __restrict__ row_splits, int32* __restrict__ n_splits, int32 rows, int32 window,
                int32 min_pages, int32 max_splits) {
    __shared__ int32 warp_totals[32];
    wait_for_previous_kernels();
    allow_next_kernel();
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
    if (threadIdx.x == blockDim.x - 1) *n_splits = before;
    if (row < rows) row_splits[row] = RowSplits{before - count, count};
    for (int i = 0; i < count; ++i) {
        const int32 begin = (first_page + i * each) * kPageSize;
        const int32 end = min(begin + each * kPageSize, context);
        splits[before - count + i] = Split{row, slot, begin, end, window_begin, i, count, 0};
    }
}

// query, out: bf16 [rows, n_heads, kHeadDim]; k_pages, v_pages: bf16 [pages, n_kv_heads, 64, kHeadDim];
// block_table: int32 [slots, table_width]; splits, n_splits: from plan_decode. partial_out: float32
// [splits, n_heads, kHeadDim]; partial_totals: float2 [splits, n_heads]. Rows of one split go to `out`, others
// to the partial results. The plan, the block table and all keys but the newest are read while the launch right
// before still runs, so that must not be one that writes them. Grid: any number of blocks. Dynamic shared
// memory: kWarps·kStages stages, two tiles of queries, the merge's rows.
template <int kHeadDim, int kKeys, int kWarps, int kStages>
__global__ void __launch_bounds__(kWarps * 32, 1)
    attention_decode(const bf16* __restrict__ query, const bf16* __restrict__ k_pages,
                     const bf16* __restrict__ v_pages, const int32* __restrict__ block_table,
                     const Split* __restrict__ splits, const int32* __restrict__ n_splits,
                     float* __restrict__ partial_out, float2* __restrict__ partial_totals,
                     bf16* __restrict__ out, int32 n_heads, int32 n_kv_heads, int32 table_width, float scale) {
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    __shared__ float2 warp_totals[kWarps * kGroupMax];
    constexpr int kStageBytes = 2 * kKeys * kHeadDim * 2;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int group = n_heads / n_kv_heads;
    const int query_rows = group <= 8 ? 8 : kGroupMax;  // with 8, the tile's other half repeats the first
    const int query_bytes = query_rows * kHeadDim * 2;
    const uint32 ring = shared_address(shared) + warp * kStages * kStageBytes;
    unsigned char* queries = shared + kWarps * kStages * kStageBytes;
    const Merge<kHeadDim, kWarps> merge{reinterpret_cast<float*>(queries + 2 * query_bytes), warp_totals,
                                        group};
    for (int i = threadIdx.x; i < 2 * query_bytes / 16; i += kWarps * 32)  // heads past the group stay zeros
        reinterpret_cast<uint4*>(queries)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();

    // The plan and all keys but the newest were written before the kernel right before this one.
    const int32 n_items = *n_splits * n_kv_heads;
    if (int32(blockIdx.x) >= n_items) return;
    Split split = splits[blockIdx.x / n_kv_heads];
    TileStream<kHeadDim, kKeys, kWarps> stream{splits, block_table, table_width, n_kv_heads, n_items};
    stream.start(warp);
    bool waited = false;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        const bool holds_newest = stream.item != int32(blockIdx.x) ||
                                  (split.index + 1 == split.count && stream.key + kKeys >= split.key_end);
        if (holds_newest && !waited) {
            wait_for_previous_kernels();
            waited = true;
        }
        stream.load(k_pages, v_pages, ring + i * kStageBytes, lane);
        copy_async_commit();
        stream.advance(warp);
    }
    wait_for_previous_kernels();  // a second time costs nothing
    allow_next_kernel();
    const auto heads_of = [&](const Split& split, int item) {
        return (int64(split.row) * n_heads + item % n_kv_heads * group) * kHeadDim;
    };
    QueryFetch<kHeadDim, kWarps * 32> fetch;
    fetch.start(query + heads_of(split, blockIdx.x), group);
    fetch.finish(queries, group);
    __syncthreads();
    int parity = 0;
    int read_stage = 0;
    int write_stage = kStages - 1;
    for (int32 item = blockIdx.x; item < n_items; item += gridDim.x) {
        const int32 next = item + gridDim.x;
        Split next_split;
        if (next < n_items) {
            next_split = splits[next / n_kv_heads];
            fetch.start(query + heads_of(next_split, next), group);
        }
        Accumulator<kHeadDim> acc;
        acc.reset();
        const uint32 lane_queries = shared_address(queries) + parity * query_bytes +
                                    TileLayout<kHeadDim>::offset(lane % query_rows, lane / 16);
        for (int key = split.key_begin + warp * kKeys; key < split.key_end; key += kWarps * kKeys) {
            copy_async_wait<kStages - 2>();
            __syncwarp();  // also: everyone is done with the stage that is refilled now
            stream.load(k_pages, v_pages, ring + write_stage * kStageBytes, lane);
            copy_async_commit();
            stream.advance(warp);
            attend_tile<kHeadDim, kKeys>(acc, lane_queries, ring + read_stage * kStageBytes, key,
                                         split.window_begin, split.key_end, scale, lane);
            write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
            read_stage = read_stage + 1 == kStages ? 0 : read_stage + 1;
        }
        merge.put(acc, scale * kLog2E, warp, lane);
        parity ^= 1;
        if (next < n_items) fetch.finish(queries + parity * query_bytes, group);
        __syncthreads();
        const int64 first_head = int64(split.row) * n_heads + item % n_kv_heads * group;
        const int64 part_row = int64(item / n_kv_heads) * n_heads + item % n_kv_heads * group;
        for (int i = threadIdx.x * 4; i < group * kHeadDim; i += kWarps * 32 * 4) {
            const int head = i / kHeadDim;
            const int column = i % kHeadDim;
            float4 merged;
            const float2 totals = merge_parts<kWarps>(
                merged, kWarps,
                [&](int w) {
                    return *reinterpret_cast<const float4*>(merge.out + (w * group + head) * merge.kStride +
                                                            column);
                },
                [&](int w) { return warp_totals[w * kGroupMax + head]; });
            if (split.count == 1) {
                store_quotient(out + (first_head + head) * kHeadDim + column, merged, totals.y);
            } else {
                *reinterpret_cast<float4*>(partial_out + (part_row + head) * kHeadDim + column) = merged;
                if (column == 0) partial_totals[part_row + head] = totals;
            }
        }
        split = next_split;
        __syncthreads();
    }
    copy_async_wait<0>();
}

// After attention_decode: out of the rows that have several splits. row_splits: from plan_decode. A block takes
// 128 columns, four of them a thread; its four warps share out the splits. Grid (n_heads·head_dim / 128, rows).
__global__ void __launch_bounds__(kMergeWarps * 32)
    merge_splits(const RowSplits* __restrict__ row_splits, const float* __restrict__ partial_out,
                 const float2* __restrict__ partial_totals, bf16* __restrict__ out, int32 n_heads,
                 int32 head_dim) {
    __shared__ float4 values[kMergeWarps][32];
    __shared__ float2 totals[kMergeWarps][32];
    wait_for_previous_kernels();
    allow_next_kernel();
    const int64 row = blockIdx.y;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int column = blockIdx.x * 128 + lane * 4;
    const RowSplits parts = row_splits[row];
    if (parts.count == 1 || (column >= n_heads * head_dim)) return;
    const int64 first = (int64(parts.first) + warp) * n_heads + column / head_dim;
    const int64 stride = int64(kMergeWarps) * n_heads;
    totals[warp][lane] = merge_parts<8>(
        values[warp][lane], (parts.count - warp + kMergeWarps - 1) / kMergeWarps,
        [&](int s) {
            return *reinterpret_cast<const float4*>(partial_out + (first + s * stride) * head_dim +
                                                    column % head_dim);
        },
        [&](int s) { return partial_totals[first + s * stride]; });
    __syncthreads();
    if (warp != 0) return;
    float4 merged;
    const float2 total = merge_parts<kMergeWarps>(
        merged, kMergeWarps, [&](int w) { return values[w][lane]; }, [&](int w) { return totals[w][lane]; });
    store_quotient(out + row * n_heads * head_dim + column, merged, total.y);
}
