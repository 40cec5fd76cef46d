// Hopper's instructions for prefill attention: tensor copies, wgmma with A in registers.
// Knows no schedule. Exists only where the target has them (sm_90a).
#pragma once

#include "attention.cuh"
#include "mbarrier.cuh"

namespace slipstream {

// CUtensorMap, made by the host.
struct alignas(64) TensorMap {
    uint64 opaque[16];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies one tile of a map of pages, [64 rows][64 columns] after another, each row's 16-byte chunks swizzled by
// the row. Rows outside of the page become zeros.
__device__ __forceinline__ void copy_page(uint32 target, const TensorMap& map, int first_row, int page_head,
                                          uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(target),
        "l"(&map), "r"(0), "r"(first_row), "r"(0), "r"(page_head), "r"(barrier)
        : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Order between registers written before and the wgmma that come.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps what is done with registers of a wgmma on the side of its wait on which it is written.
template <int kPairs>
__device__ __forceinline__ void hold(float (&values)[kPairs][4]) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(values[n][j])::"memory");
}

template <int kSteps>
__device__ __forceinline__ void hold(uint32 (&values)[kSteps][4]) {
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(values[n][j])::"memory");
}

// A matrix in shared memory, in atoms of 8 rows of 128 bytes with swizzled chunks. Strides in bytes.
template <int kLeading, int kStride>
struct Matrix {
    uint32 place;

    __device__ __forceinline__ explicit Matrix(uint32 address)
        : place((address & 0x3ffff) >> 4 | uint32(kLeading >> 4) << 16) {}

    // The descriptor from so many bytes on. One addition: the tensor cores wait for longer chains.
    __device__ __forceinline__ uint64 from(int bytes) const {
        constexpr uint32 kRest = kStride >> 4 | 1u << 30;
        uint64 descriptor;
        asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(place + (bytes >> 4)), "n"(kRest));
        return descriptor;
    }
};

#define SLIPSTREAM_QUAD(array, n) \
    "+f"(array[n][0]), "+f"(array[n][1]), "+f"(array[n][2]), "+f"(array[n][3])
#define SLIPSTREAM_OCTET(array, n)                                                        \
    SLIPSTREAM_QUAD(array, n), SLIPSTREAM_QUAD(array, n + 1), SLIPSTREAM_QUAD(array, n + 2), \
        SLIPSTREAM_QUAD(array, n + 3), SLIPSTREAM_QUAD(array, n + 4), SLIPSTREAM_QUAD(array, n + 5), \
        SLIPSTREAM_QUAD(array, n + 6), SLIPSTREAM_QUAD(array, n + 7)

// acc[64×64] (+)= a[64×16] · b[16×64], by a warpgroup; the layouts of mma_bf16, each warp 16 rows. b is [n][k] in
// memory, or [k][n] if kTransposed. With `add` 0 what acc holds is not read.
template <int kTransposed>
__device__ __forceinline__ void wgmma(float (&acc)[8][4], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, add, 1, 1, %38;\n"
        "}\n"
        : SLIPSTREAM_OCTET(acc, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed));
}

// The same for acc[64×128].
template <int kTransposed>
__device__ __forceinline__ void wgmma(float (&acc)[16][4], const uint32 (&a)[4], uint64 b, int add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
        "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, add, 1, 1, %70;\n"
        "}\n"
        : SLIPSTREAM_OCTET(acc, 0), SLIPSTREAM_OCTET(acc, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed));
}

#undef SLIPSTREAM_QUAD
#undef SLIPSTREAM_OCTET

#endif

}  // namespace slipstream
