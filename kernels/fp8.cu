// Quantises rows of bf16 to e4m3 with a scale per row: activations by token, weights by output row.
//
// Bound by memory: 2 bytes read and 1 written an element. One block a row, held in registers.
#include "fp8.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "types.cuh"

using namespace slipstream;

namespace {

constexpr int kVector = 8;

// x / y, rounded to the nearest, given y's rounded reciprocal: a guess, and its remainder's share. What division
// does besides is for operands that do not occur here. Signs keep −0 as it is; NaN and infinity become NaN.
__device__ __forceinline__ float quotient(float x, float y, float inverse) {
    const float guess = x * inverse;
    return __fmaf_rn(-__fmaf_rn(guess, y, -x), inverse, guess);
}

}  // namespace

// scale[r] = max |x[r]| / 448; out[r] = x[r] / scale[r], to the bit what IEEE division and rounding give.
// x: bf16 [rows, k]; out: e4m3 [rows, k]; scale: float32 [rows]. blockDim.x · 8 · kChunks ≥ k; k % 8 = 0.
template <int kChunks>
__global__ void __launch_bounds__(1024)
    quantise_rows(const bf16* __restrict__ x, e4m3* __restrict__ out, float* __restrict__ scale, int32 k) {
    __shared__ float scratch[32];
    wait_for_previous_kernels();
    allow_next_kernel();
    const int64 row = int64(blockIdx.x) * k;
    float values[kChunks][kVector];
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * blockDim.x + threadIdx.x) * kVector;
        if (column >= k) continue;
        load_floats(x + row + column, values[c]);
#pragma unroll
        for (int j = 0; j < kVector; ++j) largest = fmaxf(largest, fabsf(values[c][j]));
    }
    const float step = fp8_scale(block_reduce(largest, Max{}, 0.0f, scratch));
    const float inverse = __frcp_rn(step);
    if (threadIdx.x == 0) scale[blockIdx.x] = step;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = (c * blockDim.x + threadIdx.x) * kVector;
        if (column >= k) continue;
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[c][j] = quotient(values[c][j], step, inverse);
        store_e4m3(out + row + column, values[c]);
    }
}
