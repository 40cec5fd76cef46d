// Thread block clusters and their distributed shared memory (compute capability 9.0 and newer).
#pragma once

#include "ptx.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SLIPSTREAM_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define SLIPSTREAM_CLUSTER(blocks)
#endif

namespace slipstream {

// Says that this block runs, so that others may write to its memory once they have waited.
__device__ __forceinline__ void cluster_announce() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

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

// The address of block `rank`'s variable at this block's shared address.
__device__ __forceinline__ uint32 shared_address_of(uint32 address, uint32 rank) {
    uint32 theirs = address;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(rank));
#endif
    return theirs;
}

// To an address from shared_address_of.
__device__ __forceinline__ void store_remote(uint32 theirs, float4 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(theirs), "f"(value.x), "f"(value.y),
                 "f"(value.z), "f"(value.w)
                 : "memory");
#endif
}

__device__ __forceinline__ void store_remote(uint32 theirs, float2 value) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(theirs), "f"(value.x), "f"(value.y)
                 : "memory");
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
