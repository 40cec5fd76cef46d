// From the merged q|k|v product to attention's inputs: bias, per-head q/k RMSNorm, rotary embedding, and
// the write of keys and values into their pages. One launch a layer instead of five.
//
// Bound by memory: the row is read once and written once. One warp for kHeads neighbouring heads of a row: one
// for the least latency of few rows, four to share the row's place and angles among many.
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
__device__ __forceinline__ void normalise_head(float (&x)[kEach], const float (&weight)[kEach], float offset,
                                               float epsilon) {
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
struct Turn {
    float cosine[kEach];
    float sine[kEach];  // with the sign of this lane's half
    int partner;

    __device__ __forceinline__ Turn(const float* cosines, const float* sines, int half, int lane) {
        const int distance = half / kEach;
        const bool first = lane < distance;
        const bool turns = lane < 2 * distance;
        partner = first ? lane + distance : (turns ? lane - distance : lane);
        const int column = (first ? lane : lane - distance) * kEach;
        if (turns) {
            load_floats(cosines + column, cosine);
            load_floats(sines + column, sine);
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            cosine[j] = turns ? cosine[j] : 1.0f;
            sine[j] = turns ? (first ? -sine[j] : sine[j]) : 0.0f;
        }
    }

    __device__ __forceinline__ void apply(float (&x)[kEach]) const {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const float other = __shfl_sync(0xffffffffu, x[j], partner);
            x[j] = x[j] * cosine[j] + other * sine[j];
        }
    }
};

}  // namespace

// qkv: bf16 [rows, (n_heads + 2·n_kv_heads)·kHeadDim], q heads first, then k, then v. bias: bf16 of a row, or
// null. q_norm, k_norm: bf16 [kHeadDim], or both null. cosines, sines: float32 [max_position, half]. row_slot:
// int32 [rows], −1 for padding. row_position: int32 [rows] (prefill), or null (decode): then
// slot_position[slot] counts, and rows whose slot_active is 0 write nothing at all.
// block_table: int32 [slots, table_width] page numbers. q_out: bf16 [rows, n_heads, kHeadDim];
// k_pages, v_pages: bf16 [pages, n_kv_heads, 64, kHeadDim]. half % (kHeadDim / 32) = 0.
// Grid (⌈heads / (4·kHeads)⌉ with heads = n_heads + 2·n_kv_heads, rows), 128 threads.
template <int kHeadDim, int kHeads>
__global__ void __launch_bounds__(kWarps * 32, 8)
    rope_and_write(const bf16* __restrict__ qkv, const bf16* __restrict__ bias, const bf16* __restrict__ q_norm,
                   const bf16* __restrict__ k_norm, const float* __restrict__ cosines,
                   const float* __restrict__ sines, const int32* __restrict__ row_slot,
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
    const int32 block = place.position / 64;
    const int32 page = block < table_width ? block_table[int64(place.slot) * table_width + block] : -1;

#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
        const int head = first_head + i;
        if (head >= heads) return;
        const bool is_query = head < n_heads;
        const bool is_value = head >= n_heads + n_kv_heads;
        if (bias) {
            float added[kEach];
            load_floats(bias + head * kHeadDim + lane * kEach, added);
#pragma unroll
            for (int j = 0; j < kEach; ++j) x[i][j] += added[j];
        }
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
