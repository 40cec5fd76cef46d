// The parts of q4_gemm: its ring of x tiles, the scaled fragments of W, the products, clusters of blocks.
//
// An x tile is [columns][64 of k] bf16, columns being rows of x, in 16-byte chunks; chunk c of a column sits at
// c ^ (column % 8): what ldmatrix reads without conflicts, and wgmma's 128-byte swizzle. W's fragments hold k in
// the order of q4.cuh, so x is put into that order as it is copied: of each block of 32, word c of 16-byte
// chunk t is the pair 8·c + 2·t.
#pragma once

#include "cluster.cuh"
#include "q4.cuh"

namespace slipstream {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWarpgroupProducts = true;
#else
constexpr bool kHasWarpgroupProducts = false;
#endif

constexpr int kXRowBytes = kQ4TileColumns * 2;

template <int kColumns>
constexpr int kXTileBytes = kColumns* kXRowBytes;

// 4 bytes from global to shared memory.
__device__ __forceinline__ void copy_async_4(uint32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// This warp's columns of one x tile, a column with each copy. `x`: the tile's first row, at this lane's pair.
// Columns past the last row of x repeat it; their sums are not used.
template <int kColumns, int kWarps>
__device__ __forceinline__ void copy_x_tile(uint32 target, const bf16* x, int32 k, int last_row, int warp, int lane) {
    const int chunk = lane / 16 * 4 + lane % 4;
    const int word = lane % 16 / 4;
    const auto* bytes = reinterpret_cast<const unsigned char*>(x);
#pragma unroll
    for (int i = 0; i < kColumns / kWarps; ++i) {
        const int column = warp + i * kWarps;
        const uint32 place = column * kXRowBytes + ((chunk ^ (column & 7)) << 4) + word * 4;
        copy_async_4(target + place, bytes + uint64(uint32(min(column, last_row))) * uint32(2 * k));
    }
}

// Two steps of 16 of k as A operands: a block's 32 elements of rows l/4 (low) and l/4 + 8 (high), scaled.
struct Q4Fragments {
    uint32 at[2][4];
};

__device__ __forceinline__ Q4Fragments q4_fragments(uint32 low, uint32 high, uint32 scales, uint32 mask) {
    const __nv_bfloat162 low_scale = __float2bfloat162_rn(q4_scale(scales, 0));
    const __nv_bfloat162 high_scale = __float2bfloat162_rn(q4_scale(scales, 1));
    Q4Fragments result;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        const __nv_bfloat162 a = __hmul2(q4_pair(low, pair, mask), low_scale);
        const __nv_bfloat162 b = __hmul2(q4_pair(high, pair, mask), high_scale);
        result.at[pair / 2][pair % 2 * 2] = reinterpret_cast<const uint32&>(a);
        result.at[pair / 2][pair % 2 * 2 + 1] = reinterpret_cast<const uint32&>(b);
    }
    return result;
}

// One block of 32 of k against all columns, warp by warp.
template <int kColumns>
__device__ __forceinline__ void multiply_by_warp(float (&acc)[kColumns / 8][4], const Q4Fragments& a, uint32 x_tile,
                                                 int block, int lane) {
    const int row = lane / 16 * 8 + lane % 8;
    const int half = lane / 8 % 2;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const int chunk = block * 4 + step * 2 + half;
        const uint32 place = x_tile + row * kXRowBytes + ((chunk ^ (row & 7)) << 4);
#pragma unroll
        for (int pair = 0; pair < kColumns / 16; ++pair) {
            uint32 b[4];
            load_matrix_x4(b, place + pair * 16 * kXRowBytes);
            mma_bf16(acc[2 * pair], a.at[step], b[0], b[1]);
            mma_bf16(acc[2 * pair + 1], a.at[step], b[2], b[3]);
        }
    }
}

// What this thread wrote to shared memory becomes visible to wgmma, after a barrier.
__device__ __forceinline__ void fence_for_warpgroup_products() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Waits until at most kPending groups are still under way.
template <int kPending>
__device__ __forceinline__ void wait_for_warpgroup_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void begin_warpgroup_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_warpgroup_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// An operand in shared memory: columns of 128 bytes of k, swizzled; 8 columns to 1024 bytes.
__device__ __forceinline__ uint64 x_descriptor(uint32 address) {
    return uint64(address >> 4) | uint64(1) << 16 | uint64(1024 >> 4) << 32 | uint64(1) << 62;
}

// acc[64×N] += a[64×16] · b[16×N]; each of the four warps has 16 rows of a, laid out as mma_bf16's.
__device__ __forceinline__ void wgmma(float (&d)[2][4], const uint32 (&a)[4], uint64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
        "{%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&d)[4][4], const uint32 (&a)[4], uint64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
        "%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma(float (&d)[8][4], const uint32 (&a)[4], uint64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
        "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, "
        "1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
          "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
          "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#endif

// One block of 32 of k against all columns: with kByWarpgroup by four warps at once, of whose products at most one
// block's stay under way. `x_tile`: shared address; block: 0 or 1.
template <int kColumns, bool kByWarpgroup>
__device__ __forceinline__ void multiply(float (&acc)[kColumns / 8][4], const Q4Fragments& a, uint32 x_tile, int block,
                                         int lane) {
    if constexpr (!kByWarpgroup) {
        multiply_by_warp<kColumns>(acc, a, x_tile, block, lane);
    } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        begin_warpgroup_products();
        wgmma(acc, a.at[0], x_descriptor(x_tile + block * 64));
        wgmma(acc, a.at[1], x_descriptor(x_tile + block * 64 + 32));
        commit_warpgroup_products();
        wait_for_warpgroup_products<1>();
#endif
    }
}

// Writes to shared memory before it, of all blocks of the cluster, are visible after it.
__device__ __forceinline__ void cluster_barrier(int blocks) {
    if (blocks == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// Four floats of the shared memory of the cluster's block `rank`, at the address they have in this one's.
__device__ __forceinline__ float4 load_remote(uint32 address, int rank) {
    float4 value;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(shared_address_of(address, rank))
                 : "memory");
#else
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
#endif
    return value;
}

}  // namespace slipstream
