// Decode attention of one layer in one launch: bias, q/k RMSNorm and rotary embedding of the raw q|k|v rows, the
// write of the new key and value into their page, attention over all pages, and the merge of its parts.
//
// A cluster of blocks takes a row's kv head; its pages go to the blocks in turn, so how a sequence is divided
// depends on its own length and on the cluster's size alone. A page's 64 keys go to the block's warps. All that
// does not come from the product right before is on its way before the wait for it: keys and values into
// the warps' rings of cp.async stages, norms, angles, scales. Each block prepares the head's queries for itself.
// The block of the newest page makes its key and value too and puts them into the tile that was fetched without
// them. The blocks hand their results to each other's shared memory, each a slice of columns to merge in order.
//
// Between the products around it, a layer of 16/8 heads of 128 at context 256 takes 3.7 µs of one row's time on an
// H200; as three launches it took 6.9.
#include "attention_step.cuh"
#include "cluster.cuh"
#include "rope.cuh"

using namespace slipstream;

namespace {

constexpr int kMostBlocks = 8;  // of a cluster

// 4 bytes from global to shared memory, in the same groups as copy_async_16.
__device__ __forceinline__ void copy_async_4(uint32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Page numbers of a block's pages rank, rank + ranks, …: 32 at a time, one in each lane.
struct PageWalk {
    const int32* table;
    int32 width;
    int32 rank;
    int32 ranks;
    int32 batch;
    int32 entry;

    __device__ __forceinline__ void fetch(int32 new_batch, int lane) {
        batch = new_batch;
        const int32 index = rank + (batch * 32 + lane) * ranks;
        entry = index < width ? table[index] : -1;
    }

    __device__ __forceinline__ int32 page(int32 ordinal, int lane) {
        if (ordinal / 32 != batch) fetch(ordinal / 32, lane);
        return __shfl_sync(0xffffffffu, entry, ordinal % 32);
    }
};

// Fetches one tile's keys and values; those from key `end` on become 0, whatever the page holds there.
template <typename Kv, int kHeadDim, int kKeys>
__device__ __forceinline__ void load_tile(const Kv* keys, const Kv* values, uint32 stage, int key, int end,
                                          int lane) {
    using Tile = RowTile<kHeadDim * sizeof(Kv)>;
    constexpr int kEach = 16 / sizeof(Kv);
#pragma unroll
    for (int i = 0; i < kKeys * Tile::kChunks / 32; ++i) {
        const int chunk = i * 32 + lane;
        const int row = chunk / Tile::kChunks;
        const bool valid = key + row < end;
        const uint32 target = stage + Tile::offset(row, chunk % Tile::kChunks);
        copy_async_16(target, keys + chunk * kEach, valid);
        copy_async_16(target + kKeys * kHeadDim * sizeof(Kv), values + chunk * kEach, valid);
    }
}

// Divides the first `rows` rows of a fetched tile of e4m3 by what the page's scale grew by, here and in its page.
template <int kHeadDim>
__device__ __forceinline__ void rescale_tile(unsigned char* tile, e4m3* page, float factor, int rows, int lane) {
    using Tile = RowTile<kHeadDim>;
    for (int chunk = lane; chunk < rows * Tile::kChunks; chunk += 32) {
        auto* place =
            reinterpret_cast<uint4*>(tile + Tile::offset(chunk / Tile::kChunks, chunk % Tile::kChunks));
        *place = rescaled(*place, factor);
        reinterpret_cast<uint4*>(page)[chunk] = *place;
    }
}

// The new key (0) and value (1) of a block's kv head.
template <typename Kv, int kHeadDim>
struct alignas(16) Newest {
    unsigned char rows[2][kHeadDim * sizeof(Kv)];
    float scale[2];
    float factor[2];  // what older values of the page are multiplied by: old scale / new scale

    // Rounds x, and writes it here and to `target` in the page. old_scale: the page's, or 0 for a new page.
    template <int kEach>
    __device__ __forceinline__ void put(int which, const float (&x)[kEach], Kv* target, float* page_scale,
                                        float old_scale, int lane) {
        Vec<Kv, kEach> packed;
        if constexpr (kIsQuantised<Kv>) {
            float largest = 0.0f;
#pragma unroll
            for (int j = 0; j < kEach; ++j) largest = fmaxf(largest, fabsf(x[j]));
            const float raised = fmaxf(scale_for(warp_reduce(largest, Max{})), old_scale);
            packed = quantised(x, inverse_of(raised));
            if (lane == 0) {
                *page_scale = raised;
                scale[which] = raised;
                factor[which] = old_scale > 0.0f ? old_scale * inverse_of(raised) : 1.0f;
            }
        } else {
#pragma unroll
            for (int j = 0; j < kEach; ++j) packed.at[j] = from_float<Kv>(x[j]);
        }
        reinterpret_cast<Vec<Kv, kEach>*>(target)[lane] = packed;
        reinterpret_cast<Vec<Kv, kEach>*>(rows[which])[lane] = packed;
    }

    // Into row `row` of a fetched tile. All lanes.
    template <int kKeys>
    __device__ __forceinline__ void place(unsigned char* stage, int row, int lane) const {
        using Tile = RowTile<kHeadDim * sizeof(Kv)>;
        for (int i = lane; i < 2 * Tile::kChunks; i += 32) {
            const int which = i / Tile::kChunks;
            const int chunk = i % Tile::kChunks;
            *reinterpret_cast<uint4*>(stage + which * kKeys * kHeadDim * sizeof(Kv) + Tile::offset(row, chunk)) =
                reinterpret_cast<const uint4*>(rows[which])[chunk];
        }
    }
};

}  // namespace

// qkv: bf16 [rows, (n_heads + 2·n_kv_heads)·kHeadDim]. bias, weight_scale, row_scale, q_norm, k_norm: as in
// HeadWeights. cosines, sines: float32 [max_position, half], half % (kHeadDim / 32) = 0. row_slot: int32 [rows],
// −1 for padding; slot_position, slot_active: int32 [slots]. block_table: int32 [slots, table_width]. k_pages,
// v_pages: Kv [pages, n_kv_heads, 64, kHeadDim], with e4m3 their scales float32 [pages, n_kv_heads].
// out: bf16 [rows, n_heads, kHeadDim]; rows without an active slot become zeros and write no page. window: keys
// a row sees, 0 for all. The places of rows, the block table and all keys but the newest are read while the
// launch right before still runs. Grid (cluster size, n_kv_heads, rows), clusters along x. Dynamic shared
// memory: the warps' rings, the queries, what the cluster's blocks hand over.
template <typename Kv, int kHeadDim, int kKeys, int kWarps, int kStages, int kResident>
__global__ void __launch_bounds__(kWarps * 32, kResident)
    attention_step(const bf16* __restrict__ qkv, const bf16* __restrict__ bias,
                   const float* __restrict__ weight_scale, const float* __restrict__ row_scale,
                   const bf16* __restrict__ q_norm, const bf16* __restrict__ k_norm,
                   const float* __restrict__ cosines, const float* __restrict__ sines,
                   const int32* __restrict__ row_slot, const int32* __restrict__ slot_position,
                   const int32* __restrict__ slot_active, const int32* __restrict__ block_table, Kv* k_pages,
                   Kv* v_pages, float* k_scales, float* v_scales, bf16* __restrict__ out, int32 n_heads,
                   int32 n_kv_heads, int32 half, int32 table_width, int32 window, float epsilon,
                   float norm_offset, float scale) {
    constexpr int kEach = kHeadDim / 32;
    constexpr int kTilesOfPage = kPageSize / kKeys;
    constexpr int kStageBytes = 2 * kKeys * kHeadDim * int(sizeof(Kv));
    constexpr int kRingBytes = kStages * kStageBytes;
    constexpr int kStride = kHeadDim + kMergePad;
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    __shared__ float2 warp_totals[kWarps][kGroupMax];
    __shared__ float2 received_totals[kMostBlocks][kGroupMax];
    __shared__ float2 stage_scales[kWarps][kStages];
    __shared__ Newest<Kv, kHeadDim> newest;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int rank = blockIdx.x;
    const int ranks = gridDim.x;
    const int kv_head = blockIdx.y;
    const int64 row = blockIdx.z;
    const int group = n_heads / n_kv_heads;
    bf16* row_out = out + (row * n_heads + kv_head * group) * kHeadDim;

    const int32 slot = row_slot[row];
    PageWalk walk{block_table + int64(max(slot, 0)) * table_width, table_width, rank, ranks, 0, -1};
    int32 position = 0;
    bool active = false;
    if (slot >= 0) {
        walk.fetch(0, lane);
        position = slot_position[slot];
        active = slot_active[slot] != 0 && position / kPageSize < table_width;
    }
    if (!active) {
        wait_for_previous_kernels();
        allow_next_kernel();
        for (int i = threadIdx.x; rank == 0 && i < group * kHeadDim / 8; i += kWarps * 32)
            reinterpret_cast<uint4*>(row_out)[i] = make_uint4(0, 0, 0, 0);
        return;
    }
    if (ranks > 1) cluster_announce();

    const int32 context = position + 1;
    const int32 window_begin = window > 0 && context > window ? context - window : 0;
    const int32 first_page = window_begin / kPageSize;
    const int32 first = first_page > rank ? (first_page - rank + ranks - 1) / ranks : 0;
    const auto key_of = [&](int tile) {  // of the block's tiles
        return (rank + (first + tile / kTilesOfPage) * ranks) * kPageSize + tile % kTilesOfPage * kKeys;
    };
    const bool has_newest = position / kPageSize % ranks == rank;
    const bool has_pages = key_of(0) < context;
    unsigned char* ring = shared + warp * kRingBytes;
    int next_tile = warp;
    const auto load_next = [&](int stage) {
        const int key = key_of(next_tile);
        if (key < context) {
            const int64 page_head =
                int64(walk.page(first + next_tile / kTilesOfPage, lane)) * n_kv_heads + kv_head;
            const int64 base = (page_head * kPageSize + key % kPageSize) * kHeadDim;
            load_tile<Kv, kHeadDim, kKeys>(k_pages + base, v_pages + base,
                                           shared_address(ring + stage * kStageBytes), key, position, lane);
            if (kIsQuantised<Kv> && lane < 2)
                copy_async_4(shared_address(&stage_scales[warp][stage]) + lane * 4,
                             (lane == 0 ? k_scales : v_scales) + page_head);
        }
        copy_async_commit();
        next_tile += kWarps;
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_next(i);

    unsigned char* queries = shared + kWarps * kRingBytes;
    const int query_rows = group <= 8 ? 8 : kGroupMax;  // with 8, the tile's other half repeats the first
    for (int i = group * kHeadDim / 8 + threadIdx.x; i < query_rows * kHeadDim / 8; i += kWarps * 32)
        reinterpret_cast<uint4*>(queries)[i] = make_uint4(0, 0, 0, 0);
    const HeadWeights weights{bias, weight_scale, row_scale, q_norm, k_norm, epsilon, norm_offset};
    const int units = has_newest ? group + 2 : (has_pages ? group : 0);  // queries, key, value
    const auto column_of = [&](int unit) {
        const int head = unit < group ? kv_head * group + unit : n_heads + (unit - group) * n_kv_heads + kv_head;
        return head * kHeadDim + lane * kEach;
    };
    Affine<kEach> affine;
    if (warp < units) affine.fetch(weights, column_of(warp));
    float gains[2][kEach] = {};
    if (q_norm) {
        load_floats(q_norm + lane * kEach, gains[0]);
        load_floats(k_norm + lane * kEach, gains[1]);
    }
    const Turn<kEach> turn(cosines + int64(position) * half, sines + int64(position) * half, half, lane);
    const int64 new_page_head = int64(walk.table[position / kPageSize]) * n_kv_heads + kv_head;
    float old_scales[2] = {};
    if (kIsQuantised<Kv> && position % kPageSize != 0) {
        old_scales[0] = k_scales[new_page_head];
        old_scales[1] = v_scales[new_page_head];
    }
    wait_for_previous_kernels();
    allow_next_kernel();

    const bf16* source = qkv + row * (n_heads + 2 * n_kv_heads) * kHeadDim;
    float x[kEach], next[kEach];
    if (warp < units) load_floats(source + column_of(warp), x);
    if (warp + kWarps < units) load_floats(source + column_of(warp + kWarps), next);
    const float row_factor = row_scale ? row_scale[row] : 1.0f;
#pragma unroll 1
    for (int unit = warp; unit < units; unit += kWarps) {
        if (unit != warp) affine.fetch(weights, column_of(unit));
        affine.apply(x, row_factor);
        if (unit <= group) {
            if (q_norm) {
                float gain[kEach];
#pragma unroll
                for (int j = 0; j < kEach; ++j) gain[j] = unit < group ? gains[0][j] : gains[1][j];
                normalise_head<kHeadDim>(x, gain, norm_offset, epsilon);
            }
            turn.apply(x);
        }
        if (unit < group) {
            store_query<Kv, kHeadDim>(queries, unit, x, lane);
        } else {
            const int which = unit - group;
            const int64 place = (new_page_head * kPageSize + position % kPageSize) * kHeadDim;
            newest.put(which, x, (which == 0 ? k_pages : v_pages) + place,
                       (which == 0 ? k_scales : v_scales) + new_page_head, old_scales[which], lane);
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j) x[j] = next[j];
        if (unit + 2 * kWarps < units) load_floats(source + column_of(unit + 2 * kWarps), next);
    }
    __syncthreads();

    Accumulator<kHeadDim> acc;
    acc.reset();
    float value_unit = 1.0f;
    const uint32 lane_queries =
        shared_address(queries) + TileLayout<kHeadDim>::offset(lane % query_rows, lane / 16);
    int read_stage = 0;
    int write_stage = kStages - 1;
    for (int tile = warp; key_of(tile) < context; tile += kWarps) {
        copy_async_wait<kStages - 2>();
        __syncwarp();  // also: everyone is done with the stage that is refilled now
        load_next(write_stage);
        const int key = key_of(tile);
        unsigned char* stage = ring + read_stage * kStageBytes;
        float2 scales = kIsQuantised<Kv> ? stage_scales[warp][read_stage] : make_float2(1.0f, 1.0f);
        if (key / kPageSize == position / kPageSize) {
            if constexpr (kIsQuantised<Kv>) {
                scales = make_float2(newest.scale[0], newest.scale[1]);
                const int64 place = (new_page_head * kPageSize + key % kPageSize) * kHeadDim;
                const int older = min(kKeys, position - key);
                if (newest.factor[0] != 1.0f)
                    rescale_tile<kHeadDim>(stage, k_pages + place, newest.factor[0], older, lane);
                if (newest.factor[1] != 1.0f)
                    rescale_tile<kHeadDim>(stage + kStageBytes / 2, v_pages + place, newest.factor[1], older,
                                           lane);
            }
            if (position < key + kKeys) newest.template place<kKeys>(stage, position - key, lane);
            __syncwarp();
        }
        if constexpr (kIsQuantised<Kv>)
            attend_quantised<kHeadDim, kKeys>(acc, value_unit, scales, lane_queries, shared_address(stage), key,
                                              window_begin, context, scale, lane);
        else
            attend_tile<kHeadDim, kKeys>(acc, lane_queries, shared_address(stage), key, window_begin, context,
                                         scale, lane);
        write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
        read_stage = read_stage + 1 == kStages ? 0 : read_stage + 1;
    }
    copy_async_wait<0>();
    __syncwarp();  // the warp's ring is free: it takes the warp's result
    put_part<Kv, kHeadDim>(acc, value_unit, reinterpret_cast<float*>(ring), warp_totals[warp], group,
                           scale * kLog2E, lane);
    __syncthreads();
    if (ranks > 1) cluster_wait();  // all blocks have started

    unsigned char* received = queries + query_rows * kHeadDim * 2;  // float4 [ranks][slice]
    const int slice = group * kHeadDim / 4 / ranks;
    for (int i = threadIdx.x; i < group * kHeadDim / 4; i += kWarps * 32) {
        const int head = i * 4 / kHeadDim;
        const int column = i * 4 % kHeadDim;
        float4 merged;
        const float2 totals = merge_parts<kWarps>(
            merged, kWarps,
            [&](int w) {
                return *reinterpret_cast<const float4*>(shared + w * kRingBytes + (head * kStride + column) * 4);
            },
            [&](int w) { return warp_totals[w][head]; });
        if (ranks == 1) {
            store_quotient(row_out + i * 4, merged, totals.y);
        } else {
            const int target = i / slice;
            store_remote(shared_address_of(shared_address(received) + (rank * slice + i % slice) * 16, target),
                         merged);
            if (column == 0 || i % slice == 0)
                store_remote(shared_address_of(shared_address(&received_totals[rank][head]), target), totals);
        }
    }
    if (ranks == 1) return;
    __syncwarp();
    cluster_arrive();
    cluster_wait();
    for (int i = threadIdx.x; i < slice; i += kWarps * 32) {
        const int head = (rank * slice + i) * 4 / kHeadDim;
        float4 merged;
        const float2 totals = merge_parts<kMostBlocks>(
            merged, ranks, [&](int r) { return reinterpret_cast<const float4*>(received)[r * slice + i]; },
            [&](int r) { return received_totals[r][head]; });
        store_quotient(row_out + (rank * slice + i) * 4, merged, totals.y);
    }
}
