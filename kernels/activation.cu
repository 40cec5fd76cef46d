// Gated feed-forward activations: SwiGLU and GeGLU from the merged gate|up product, with row quantisation.
//
// Bound by memory: 4 bytes read and 2 written an element, or 1 if it is quantised.
#include "cluster.cuh"
#include "fp8.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "types.cuh"

using namespace slipstream;

namespace {

constexpr int kVector = 8;

__device__ __forceinline__ float silu(float x) {
    return __fdividef(x, 1.0f + __expf(-x));
}

// The tanh form: 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// Weight scales of some gates and ups, which no earlier kernel writes: fetched before the wait.
struct Scales {
    float gate[kVector], up[kVector];

    __device__ __forceinline__ void load(const float* weight_scale, int32 inter, int column) {
        load_floats(weight_scale + column, gate);
        load_floats(weight_scale + inter + column, up);
    }
};

// act(gate) · up of 8 elements of a row of gate|up.
template <bool kGelu, bool kScaled>
__device__ __forceinline__ void activate(const bf16* row, int32 inter, int column, const Scales& scales,
                                         float row_scale, float (&out)[kVector]) {
    float up[kVector];
    load_floats(row + column, out);
    load_floats(row + inter + column, up);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
        if constexpr (kScaled) {
            out[j] *= scales.gate[j] * row_scale;
            up[j] *= scales.up[j] * row_scale;
        }
        out[j] = (kGelu ? gelu_tanh(out[j]) : silu(out[j])) * up[j];
    }
}

}  // namespace

// out[r, i] = act(g[r, i]) · g[r, inter + i], where g = gate_up or, with kScaled, of an FP8 product's raw sums
// gate_up[r, n] · weight_scale[n] · row_scale[r]. gate_up: bf16 [rows, 2·inter]; weight_scale: float32
// [2·inter]; row_scale: float32 [rows]; out: bf16 [rows, inter]. One thread for 8 elements; grid
// (⌈inter / (8·blockDim)⌉, rows); inter % 8 = 0.
template <bool kGelu, bool kScaled>
__global__ void __launch_bounds__(256)
    gated_activation(const bf16* __restrict__ gate_up, const float* __restrict__ weight_scale,
                     const float* __restrict__ row_scale, bf16* __restrict__ out, int32 inter) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kVector;
    const bool inside = column < inter;
    Scales scales;
    if (kScaled && inside) scales.load(weight_scale, inter, column);
    wait_for_previous_kernels();
    allow_next_kernel();
    if (!inside) return;
    const int64 row = blockIdx.y;
    float values[kVector];
    activate<kGelu, kScaled>(gate_up + row * 2 * inter, inter, column, scales, kScaled ? row_scale[row] : 1.0f,
                             values);
    store_floats(out + row * inter + column, values);
}

// The same to e4m3 [rows, inter] with scale float32 [rows] = amax / 448. A cluster of kCluster blocks shares a row;
// blockDim.x · 8 · kChunks · kCluster ≥ inter. kEarly: weight scales are held in registers from before the
// wait, which hides their latency but leaves room for fewer rows at once on a multiprocessor.
template <bool kGelu, bool kScaled, int kCluster, int kChunks, bool kEarly, int kThreads, int kResident>
__global__ void __launch_bounds__(kThreads, kResident)
    gated_activation_fp8(const bf16* __restrict__ gate_up, const float* __restrict__ weight_scale,
                         const float* __restrict__ row_scale, e4m3* __restrict__ out, float* __restrict__ scale,
                         int32 inter) {
    __shared__ float scratch[32];
    __shared__ float2 largest_of[kCluster];
    const int rank = blockIdx.x % kCluster;
    const int64 row = blockIdx.x / kCluster;
    const int first = (rank * kChunks * blockDim.x + threadIdx.x) * kVector;
    const int stride = blockDim.x * kVector;
    Scales early[kChunks];
    if constexpr (kScaled && kEarly) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
            if (first + c * stride < inter) early[c].load(weight_scale, inter, first + c * stride);
    }
    if constexpr (kCluster > 1) cluster_announce();
    wait_for_previous_kernels();
    allow_next_kernel();

    const float token_scale = kScaled ? row_scale[row] : 1.0f;
    float values[kChunks][kVector];
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = first + c * stride;
        if (column >= inter) continue;
        Scales late;
        if constexpr (kScaled && !kEarly) late.load(weight_scale, inter, column);
        activate<kGelu, kScaled>(gate_up + row * 2 * inter, inter, column, kEarly ? early[c] : late, token_scale,
                                 values[c]);
#pragma unroll
        for (int j = 0; j < kVector; ++j) largest = fmaxf(largest, fabsf(values[c][j]));
    }
    largest = block_reduce(largest, Max{}, 0.0f, scratch);
    if constexpr (kCluster > 1) {
        cluster_wait();  // all blocks of the cluster have begun, so that their shared memory can be written
        if (threadIdx.x < kCluster) {
            const uint32 theirs = shared_address_of(shared_address(&largest_of[rank]), threadIdx.x);
            store_remote(theirs, make_float2(largest, 0.0f));
        }
        cluster_arrive();
        cluster_wait();
#pragma unroll
        for (int i = 0; i < kCluster; ++i) largest = fmaxf(largest, largest_of[i].x);
    }
    const float step = fp8_scale(largest);
    const float inverse_step = 1.0f / step;
    if (rank == 0 && threadIdx.x == 0) scale[row] = step;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        const int column = first + c * stride;
        if (column >= inter) continue;
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[c][j] *= inverse_step;
        store_e4m3(out + row * inter + column, values[c]);
    }
}
