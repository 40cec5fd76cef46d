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

// Exclusive running sum over the block; `total` is the whole block's. `scratch`: 32 elements.
template <int kBlock, typename T>
__device__ __forceinline__ T block_scan(T value, T& total, T* scratch) {
    const int lane = threadIdx.x % 32;
    T inclusive = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const T left = __shfl_up_sync(0xffffffffu, inclusive, offset);
        if (lane >= offset) inclusive += left;
    }
    __syncthreads();
    if (lane == 31) scratch[threadIdx.x / 32] = inclusive;
    __syncthreads();
    T before = 0;
    total = 0;
#pragma unroll
    for (int warp = 0; warp < kBlock / 32; ++warp) {
        if (warp < int(threadIdx.x / 32)) before += scratch[warp];
        total += scratch[warp];
    }
    return before + inclusive - value;
}

}  // namespace slipstream
