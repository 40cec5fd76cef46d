// From the merged q|k|v product to attention's inputs: bias, per-head q/k RMSNorm, rotary embedding, and
// the write of keys and values into their pages. One launch a layer instead of five.
//
// Bound by memory: the row is read once and written once. One warp for kHeads neighbouring heads of a row: one
// for the least latency of few rows, four to share the row's place and angles among many.
#include "kv_fp8.cuh"
#include "ptx.cuh"
#include "rope.cuh"

using namespace slipstream;

namespace {

constexpr int kWarps = 4;
constexpr int kQuantisingWarps = 8;
constexpr int kChunkRows = 64;

// Where a row's sequence stands. slot < 0: nothing is to be done.
struct RowPlace {
    int32 slot;
    int32 position;
};

__device__ __forceinline__ RowPlace place_of(int64 row, const int32* row_slot, const int32* row_position,
                                             const int32* slot_position, const int32* slot_active) {
    const int32 slot = row_slot[row];
    if (slot < 0) return {-1, 0};
    if (row_position) return {slot, row_position[row]};
    if (!slot_active[slot]) return {-1, 0};
    return {slot, slot_position[slot]};
}

// How many rows from `row` on have its slot, up to 64. For whole warps.
__device__ __forceinline__ int run_length(const int32* row_slot, int row, int rows, int lane) {
    const int32 slot = row_slot[row];
    const auto ends = [&](int i) { return row + i >= rows || row_slot[row + i] != slot; };
    const uint32 low = __ballot_sync(0xffffffffu, ends(lane));
    const uint32 high = __ballot_sync(0xffffffffu, ends(32 + lane));
    return low ? __ffs(low) - 1 : (high ? 31 + __ffs(high) : 64);
}

}  // namespace

// qkv: bf16 [rows, (n_heads + 2·n_kv_heads)·kHeadDim], q heads first, then k, then v. bias, weight_scale,
// row_scale, q_norm, k_norm: as in HeadWeights. cosines, sines: float32 [max_position, half]. row_slot:
// int32 [rows], −1 for padding. row_position: int32 [rows] (prefill), or null (decode): then
// slot_position[slot] counts, and rows whose slot_active is 0 write nothing at all.
// block_table: int32 [slots, table_width] page numbers. q_out: bf16 [rows, n_heads, kHeadDim];
// k_pages, v_pages: bf16 [pages, n_kv_heads, 64, kHeadDim]. half % (kHeadDim / 32) = 0.
// Grid (⌈heads / (4·kHeads)⌉ with heads = n_heads + 2·n_kv_heads, rows), 128 threads.
template <int kHeadDim, int kHeads>
__global__ void __launch_bounds__(kWarps * 32, 8)
    rope_and_write(const bf16* __restrict__ qkv, const bf16* __restrict__ bias,
                   const float* __restrict__ weight_scale, const float* __restrict__ row_scale,
                   const bf16* __restrict__ q_norm, const bf16* __restrict__ k_norm,
                   const float* __restrict__ cosines, const float* __restrict__ sines,
                   const int32* __restrict__ row_slot,
                   const int32* __restrict__ row_position, const int32* __restrict__ slot_position,
                   const int32* __restrict__ slot_active, const int32* __restrict__ block_table,
                   bf16* __restrict__ q_out, bf16* __restrict__ k_pages, bf16* __restrict__ v_pages,
                   int32 n_heads, int32 n_kv_heads, int32 half, int32 table_width, float epsilon,
                   float norm_offset) {
    constexpr int kEach = kHeadDim / 32;
    const int lane = threadIdx.x % 32;
    const int first_head = (blockIdx.x * kWarps + threadIdx.x / 32) * kHeads;
    const int heads = n_heads + 2 * n_kv_heads;
    wait_for_previous_kernels();
    allow_next_kernel();
    if (first_head >= heads) return;

    const int64 row = blockIdx.y;
    float x[kHeads][kEach];  // first of all, so that these loads overlap with those of the row's place
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
        if (first_head + i < heads)
            load_floats(qkv + (row * heads + first_head + i) * kHeadDim + lane * kEach, x[i]);
    const RowPlace place = place_of(row, row_slot, row_position, slot_position, slot_active);
    if (place.slot < 0) return;
    const Turn<kEach> turn(cosines + int64(place.position) * half, sines + int64(place.position) * half, half,
                           lane);
    const HeadWeights weights{bias, weight_scale, row_scale, q_norm, k_norm, epsilon, norm_offset};
    const float row_factor = row_scale ? row_scale[row] : 1.0f;
    const int32 block = place.position / 64;
    const int32 page = block < table_width ? block_table[int64(place.slot) * table_width + block] : -1;

#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
        const int head = first_head + i;
        if (head >= heads) return;
        const bool is_query = head < n_heads;
        const bool is_value = head >= n_heads + n_kv_heads;
        Affine<kEach> affine;
        affine.fetch(weights, head * kHeadDim + lane * kEach);
        affine.apply(x[i], row_factor);
        if (!is_value) {
            if (const bf16* norm = is_query ? q_norm : k_norm) {
                float weight[kEach];
                load_floats(norm + lane * kEach, weight);
                normalise_head<kHeadDim>(x[i], weight, norm_offset, epsilon);
            }
            turn.apply(x[i]);
        }
        if (is_query) {
            store_floats(q_out + (row * n_heads + head) * kHeadDim + lane * kEach, x[i]);
        } else if (page >= 0) {
            const int kv_head = is_value ? head - n_heads - n_kv_heads : head - n_heads;
            bf16* target = (is_value ? v_pages : k_pages) +
                           ((int64(page) * n_kv_heads + kv_head) * 64 + place.position % 64) * kHeadDim;
            store_floats(target + lane * kEach, x[i]);
        }
    }
}

// The same for prefill with e4m3 pages. A block takes one head of q, k or v in 64 rows. Of keys and values it
// takes the pages whose first row in this launch is among them, to their last row, wherever that stands: so one
// block writes a page's head, which it reads twice, for the largest magnitude and then for the values.
// The rows of a segment follow each other: row r continues row r − 1 if it has the same slot.
// Grid (n_heads + 2·n_kv_heads, ⌈rows / 64⌉), 256 threads.
template <int kHeadDim>
__global__ void __launch_bounds__(kQuantisingWarps * 32)
    rope_and_quantise(const bf16* __restrict__ qkv, const bf16* __restrict__ bias,
                      const float* __restrict__ weight_scale, const float* __restrict__ row_scale,
                      const bf16* __restrict__ q_norm, const bf16* __restrict__ k_norm,
                      const float* __restrict__ cosines, const float* __restrict__ sines,
                      const int32* __restrict__ row_slot, const int32* __restrict__ row_position,
                      const int32* __restrict__ block_table, bf16* __restrict__ q_out, e4m3* k_pages,
                      e4m3* v_pages, float* k_scales, float* v_scales, int32 rows, int32 n_heads,
                      int32 n_kv_heads, int32 half, int32 table_width, float epsilon, float norm_offset) {
    constexpr int kEach = kHeadDim / 32;
    __shared__ float scratch[32];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int head = blockIdx.x;
    const int heads = n_heads + 2 * n_kv_heads;
    const bool is_query = head < n_heads;
    const bool is_value = head >= n_heads + n_kv_heads;
    const HeadWeights weights{bias, weight_scale, row_scale, q_norm, k_norm, epsilon, norm_offset};
    const bf16* norm = is_value ? nullptr : (is_query ? q_norm : k_norm);
    const int column = head * kHeadDim + lane * kEach;
    Affine<kEach> affine;
    affine.fetch(weights, column);
    float gain[kEach];
    if (norm) load_floats(norm + lane * kEach, gain);
    wait_for_previous_kernels();
    allow_next_kernel();

    const auto prepare = [&](float (&x)[kEach], int row, int position) {
        load_floats(qkv + int64(row) * heads * kHeadDim + column, x);
        affine.apply(x, row_scale ? row_scale[row] : 1.0f);
        if (norm) normalise_head<kHeadDim>(x, gain, norm_offset, epsilon);
        if (!is_value) Turn<kEach>(cosines + int64(position) * half, sines + int64(position) * half, half, lane).apply(x);
    };
    const int end = min(rows, int(blockIdx.y + 1) * kChunkRows);
    if (is_query) {
        for (int row = blockIdx.y * kChunkRows + warp; row < end; row += kQuantisingWarps) {
            if (row_slot[row] < 0) continue;
            float x[kEach];
            prepare(x, row, row_position[row]);
            store_floats(q_out + (int64(row) * n_heads + head) * kHeadDim + lane * kEach, x);
        }
        return;
    }
    const int kv_head = is_value ? head - n_heads - n_kv_heads : head - n_heads;
    int row = blockIdx.y * kChunkRows;
    while (row < end) {  // the same in all threads
        const int32 slot = row_slot[row];
        const int32 first = row_position[row];
        const int count = min(slot < 0 ? 64 : 64 - first % 64, run_length(row_slot, row, rows, lane));
        const bool starts = slot >= 0 && (first % 64 == 0 || row == 0 || row_slot[row - 1] != slot);
        if (!starts || first / 64 >= table_width) {
            row += count;
            continue;
        }
        const int64 page_head = int64(block_table[int64(slot) * table_width + first / 64]) * n_kv_heads + kv_head;
        e4m3* page = (is_value ? v_pages : k_pages) + page_head * 64 * kHeadDim;
        float* page_scale = (is_value ? v_scales : k_scales) + page_head;
        const float old_scale = first % 64 == 0 ? 0.0f : *page_scale;

        float largest = 0.0f;
        for (int i = warp; i < count; i += kQuantisingWarps) {
            float x[kEach];
            prepare(x, row + i, first + i);
#pragma unroll
            for (int j = 0; j < kEach; ++j) largest = fmaxf(largest, fabsf(x[j]));
        }
        largest = block_reduce(largest, Max{}, 0.0f, scratch);
        const float scale = fmaxf(scale_for(largest), old_scale);
        if (scale != old_scale && old_scale > 0.0f) {
            const float factor = old_scale * inverse_of(scale);
            auto* chunks = reinterpret_cast<uint4*>(page);
            for (int i = threadIdx.x; i < first % 64 * kHeadDim / 16; i += kQuantisingWarps * 32)
                chunks[i] = rescaled(chunks[i], factor);
        }
        for (int i = warp; i < count; i += kQuantisingWarps) {
            float x[kEach];
            prepare(x, row + i, first + i);
            reinterpret_cast<Vec<e4m3, kEach>*>(page + (first % 64 + i) * kHeadDim)[lane] =
                quantised(x, inverse_of(scale));
        }
        __syncthreads();  // everyone has read the old scale and the scratch
        if (threadIdx.x == 0) *page_scale = scale;
        row += count;
    }
}
