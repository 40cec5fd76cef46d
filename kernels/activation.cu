// Gated feed-forward activations: SwiGLU and GeGLU from the merged gate|up product.
//
// Bound by memory: 4 bytes read and 2 written an element.
#include "ptx.cuh"
#include "types.cuh"

using namespace slipstream;

namespace {

constexpr int kVector = 8;

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + __expf(-x));
}

// The tanh form: 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

}  // namespace

// out[r, i] = act(gate_up[r, i]) · gate_up[r, inter + i]. gate_up: bf16 [rows, 2·inter]; out: bf16 [rows,
// inter]. One thread for 8 elements; grid (⌈inter / (8·blockDim)⌉, rows); inter % 8 = 0.
template <bool kGelu>
__global__ void __launch_bounds__(256)
    gated_activation(const bf16* __restrict__ gate_up, bf16* __restrict__ out, int32 inter) {
    wait_for_previous_kernels();
    allow_next_kernel();
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kVector;
    if (column >= inter) return;
    const int64 row = blockIdx.y;
    float gate[kVector], up[kVector];
    load_floats(gate_up + row * 2 * inter + column, gate);
    load_floats(gate_up + row * 2 * inter + inter + column, up);
#pragma unroll
    for (int j = 0; j < kVector; ++j) gate[j] = (kGelu ? gelu_tanh(gate[j]) : silu(gate[j])) * up[j];
    store_floats(out + row * inter + column, gate);
}
