// From the merged q|k|v product to attention's inputs: bias, per-head q/k RMSNorm, rotary embedding, and
// the write of keys and values into their pages. One launch a layer instead of five.
//
// Bound by memory: the row is read once and written once. One warp for one head of one row.
#include "ptx.cuh"
#include "reduce.cuh"
#include "types.cuh"

using namespace slipstream;

namespace {

constexpr int kWarps = 4;

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

// x ← x / rms(x) · (offset + weight) over the head's kHeadDim elements, kEach of them in each lane.
template <int kHeadDim, int kEach>
__device__ __forceinline__ void normalise_head(float (&x)[kEach], const float (&weight)[kEach], float offset, float epsilon) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) squares += x[j] * x[j];
    const float inverse = rsqrtf(warp_reduce(squares, Sum{}) / kHeadDim + epsilon);
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] *= inverse * (offset + weight[j]);
}

// Rotates element i < half with element i + half (the "rotate half" pairing); elements from 2·half on stay.
// Both partners sit at the same place of lanes half / kEach apart.
template <int kEach>
__device__ __forceinline__ void rotate(float (&x)[kEach], const float* cosines, const float* sines, int half, int lane) {
    const int distance = half / kEach;
    const bool first = lane < distance;
    const bool turns = lane < 2 * distance;
    const int partner = first ? lane + distance : (turns ? lane - distance : lane);
    float c[kEach], s[kEach];
    if (turns) {
        const int column = (first ? lane : lane - distance) * kEach;
        load_floats(cosines + column, c);
        load_floats(sines + column, s);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const float other = __shfl_sync(0xffffffffu, x[j], partner);
        if (turns) x[j] = first ? x[j] * c[j] - other * s[j] : x[j] * c[j] + other * s[j];
    }
}

}  // namespace

// qkv: bf16 [rows, (n_heads + 2·n_kv_heads)·kHeadDim], q heads first, then k, then v. bias: bf16 of a row, or null.
// q_norm, k_norm: bf16 [kHeadDim], or both null. cosines, sines: float32 [max_position, half].
// row_slot: int32 [rows], −1 for padding. row_position: int32 [rows] (prefill), or null (decode): then
// slot_position[slot] counts, and rows whose slot_active is 0 write nothing at all.
// block_table: int32 [slots, table_width] page numbers. q_out: bf16 [rows, n_heads, kHeadDim];
// k_pages, v_pages: bf16 [pages, n_kv_heads, 64, kHeadDim]. half % (kHeadDim / 32) = 0.
// Grid (⌈(n_heads + 2·n_kv_heads) / 4⌉, rows), 128 threads.
template <int kHeadDim>
__global__ void __launch_bounds__(kWarps * 32, 8)
    rope_and_write(const bf16* __restrict__ qkv, const bf16* __restrict__ bias, const bf16* __restrict__ q_norm,
                   const bf16* __restrict__ k_norm, const float* __restrict__ cosines, const float* __restrict__ sines,
                   const int32* __restrict__ row_slot, const int32* __restrict__ row_position,
                   const int32* __restrict__ slot_position, const int32* __restrict__ slot_active,
                   const int32* __restrict__ block_table, bf16* __restrict__ q_out, bf16* __restrict__ k_pages,
                   bf16* __restrict__ v_pages, int32 n_heads, int32 n_kv_heads, int32 half, int32 table_width,
                   float epsilon, float norm_offset) {
    constexpr int kEach = kHeadDim / 32;
    const int lane = threadIdx.x % 32;
    const int head = blockIdx.x * kWarps + threadIdx.x / 32;
    const bool is_query = head < n_heads;
    const bool is_value = head >= n_heads + n_kv_heads;
    const bool in_range = head < n_heads + 2 * n_kv_heads;
    float weight[kEach];
    const bf16* norm = is_query ? q_norm : k_norm;
    if (norm && in_range && !is_value) load_floats(norm + lane * kEach, weight);
    allow_next_kernel();
    wait_for_previous_kernels();
    if (!in_range) return;

    const int64 row = blockIdx.y;
    const RowPlace place = place_of(row, row_slot, row_position, slot_position, slot_active);
    if (place.slot < 0) return;

    float x[kEach];
    const int column = head * kHeadDim + lane * kEach;
    load_floats(qkv + row * (n_heads + 2 * n_kv_heads) * kHeadDim + column, x);
    if (bias) {
        float added[kEach];
        load_floats(bias + column, added);
#pragma unroll
        for (int j = 0; j < kEach; ++j) x[j] += added[j];
    }
    if (!is_value) {
        if (norm) normalise_head<kHeadDim>(x, weight, norm_offset, epsilon);
        const int64 table_row = int64(place.position) * half;
        rotate(x, cosines + table_row, sines + table_row, half, lane);
    }
    if (is_query) {
        store_floats(q_out + (row * n_heads + head) * kHeadDim + lane * kEach, x);
        return;
    }
    const int32 block = place.position / 64;
    if (block >= table_width) return;
    const int32 page = block_table[int64(place.slot) * table_width + block];
    if (page < 0) return;
    const int kv_head = is_value ? head - n_heads - n_kv_heads : head - n_heads;
    bf16* pages = is_value ? v_pages : k_pages;
    store_floats(pages + ((int64(page) * n_kv_heads + kv_head) * 64 + place.position % 64) * kHeadDim + lane * kEach, x);
}
