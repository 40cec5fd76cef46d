// RMSNorm over rows, fused with the residual add before it and, where asked, with row quantisation.
//
// Bound by memory: each row is read once, held in registers, and written once. One block a row.
#include "fp8.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "types.cuh"

using namespace slipstream;

namespace {

constexpr int kVector = 8;  // elements a thread handles at once: 16 bytes of bf16

}  // namespace

// residual[r] += delta[r]; out[r] = residual[r] / rms(residual[r]) · (weight_offset + weight).
//
// residual: bf16 [·, hidden]. delta: bf16 [·, hidden] or null (nothing is added, residual stays as it is).
// With kScaled delta holds the raw sums of an FP8 product: added is delta[r, n] · weight_scale[n] ·
// row_scale[r], with delta_weight_scale float32 [hidden] and delta_row_scale float32 [·], indexed like delta.
// row_index: null, or int32 [rows]: row r reads residual[row_index[r]] instead, adds delta[row_index[r]]
// and leaves the residual alone, so that only the rows that sample are normalised.
// out: bf16 [rows, hidden]; with kQuantize e4m3 [rows, hidden] and scale float32 [rows] = amax / 448.
// blockDim.x · 8 · kChunks ≥ hidden; hidden % 8 = 0.
template <bool kQuantize, bool kScaled, int kChunks>
__global__ void __launch_bounds__(1024)
    add_rms_norm(bf16* __restrict__ residual, const bf16* __restrict__ delta,
                 const float* __restrict__ delta_weight_scale, const float* __restrict__ delta_row_scale,
                 const bf16* __restrict__ weight, const int32* __restrict__ row_index, void* __restrict__ out,
                 float* __restrict__ scale, int32 hidden, float epsilon, float weight_offset) {
    __shared__ float scratch[2][32];
    float scaling[kChunks][kVector];  // weights do not depend on earlier kernels: fetched before the wait
    float delta_scaling[kScaled ? kChunks : 1][kVector];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * blockDim.x + threadIdx.x) * kVector;
        if (column >= hidden) continue;
        load_floats(weight + column, scaling[c]);
        if constexpr (kScaled) load_floats(delta_weight_scale + column, delta_scaling[c]);
    }
    wait_for_previous_kernels();
    allow_next_kernel();

    const int64 row = row_index ? row_index[blockIdx.x] : blockIdx.x;
    bf16* source = residual + row * hidden;
    const float delta_scale = kScaled ? delta_row_scale[row] : 1.0f;
    float values[kChunks][kVector];
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * blockDim.x + threadIdx.x) * kVector;
        if (column >= hidden) continue;
        load_floats(source + column, values[c]);
        if (delta) {
            float added[kVector];
            load_floats(delta + row * hidden + column, added);
            if constexpr (kScaled) {
#pragma unroll
                for (int j = 0; j < kVector; ++j) added[j] *= delta_scaling[c][j] * delta_scale;
            }
#pragma unroll
            for (int j = 0; j < kVector; ++j)
                values[c][j] = to_float(from_float<bf16>(values[c][j] + added[j]));
            if (!row_index) store_floats(source + column, values[c]);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) squares += values[c][j] * values[c][j];
    }
    squares = block_reduce(squares, Sum{}, 0.0f, scratch[0]);
    const float inverse = rsqrtf(squares / hidden + epsilon);

    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * blockDim.x + threadIdx.x) * kVector;
        if (column >= hidden) continue;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            values[c][j] *= inverse * (weight_offset + scaling[c][j]);
            largest = fmaxf(largest, fabsf(values[c][j]));
        }
        if constexpr (!kQuantize)
            store_floats(static_cast<bf16*>(out) + blockIdx.x * int64(hidden) + column, values[c]);
    }
    if constexpr (kQuantize) {
        largest = block_reduce(largest, Max{}, 0.0f, scratch[1]);
        const float step = fp8_scale(largest);
        const float inverse_step = 1.0f / step;
        if (threadIdx.x == 0) scale[blockIdx.x] = step;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int column = (c * blockDim.x + threadIdx.x) * kVector;
            if (column >= hidden) continue;
#pragma unroll
            for (int j = 0; j < kVector; ++j) values[c][j] *= inverse_step;
            store_e4m3(static_cast<e4m3*>(out) + blockIdx.x * int64(hidden) + column, values[c]);
        }
    }
}
