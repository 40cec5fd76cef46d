// Reductions over a warp and a block, in a fixed order, so the same inputs give the same bits.
#pragma once

#include "types.cuh"

namespace slipstream {

struct Sum {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a + b;
    }
};

struct Max {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};

// All lanes get the result over groups of kLanes lanes.
template <int kLanes = 32, typename T, typename Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        value = op(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
}

// All threads get the result. `scratch`: 32 shared elements, free again when the caller next synchronises.
// blockDim.x must be a multiple of 32.
template <typename T, typename Op>
__device__ __forceinline__ T block_reduce(T value, Op op, T identity, T* scratch) {
    const int lane = threadIdx.x % 32;
    const int warps = blockDim.x / 32;
    value = warp_reduce(value, op);
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_reduce(lane < warps ? scratch[lane] : identity, op);
}

}  // namespace slipstream
