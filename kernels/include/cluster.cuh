// Thread block clusters and their distributed shared memory (compute capability 9.0 and newer).
#pragma once

#include "ptx.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SLIPSTREAM_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define SLIPSTREAM_CLUSTER(blocks)
#endif

namespace slipstream {

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes into the same variable of another block of the cluster.
__device__ __forceinline__ void store_in_cluster(float* mine, int rank, float value) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 theirs;\nmapa.shared::cluster.u32 theirs, %0, %1;\n"
        "st.shared::cluster.f32 [theirs], %2;\n}" ::"r"(shared_address(mine)),
        "r"(rank), "f"(value)
        : "memory");
#endif
}

}  // namespace slipstream
