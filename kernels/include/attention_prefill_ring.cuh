// Pages of keys and values on their way to shared memory, with cp.async: bf16 as they are, e4m3 widened.
// Knows no query.
#pragma once

#include "attention.cuh"

namespace slipstream {

// 4 bytes from global to shared memory.
__device__ __forceinline__ void copy_async_4(uint32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ float load_shared_float(uint32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint4 load_shared_16(uint32 address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_shared_16(uint32 address, const uint4& value) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

// e4m3 to bf16, times a scale that is a power of two: exact. The exponent's and mantissa's bits, moved to
// where bf16 has its own, are the value times 2^−120 (subnormals too), so one factor would do; two, because
// 2^120 · scale may be more than bf16 holds.
struct E4m3Widener {
    __nv_bfloat162 first;
    __nv_bfloat162 second;

    __device__ __forceinline__ explicit E4m3Widener(float scale)
        : first(__float2bfloat162_rn(18446744073709551616.0f)),            // 2^64
          second(__float2bfloat162_rn(scale * 72057594037927936.0f)) {}  // 2^56

    // Bytes 0 and 1 of v, or 2 and 3.
    template <int kSelector>
    __device__ __forceinline__ uint32 pair(uint32 v) const {
        const uint32 apart = __byte_perm(v, 0, kSelector);
        const uint32 moved = (apart & 0x80008000u) | ((apart >> 4) & 0x07f007f0u);
        const __nv_bfloat162 none = __float2bfloat162_rn(-0.0f);
        __nv_bfloat162 value = *reinterpret_cast<const __nv_bfloat162*>(&moved);
        value = __hfma2(__hfma2(value, first, none), second, none);
        return *reinterpret_cast<const uint32*>(&value);
    }

    __device__ __forceinline__ uint4 operator()(uint32 low, uint32 high) const {
        return make_uint4(pair<0x1404>(low), pair<0x3424>(low), pair<0x1404>(high), pair<0x3424>(high));
    }
};

// Waits for the kThreads threads of this part of the block. Parts count from 0.
template <int kThreads>
__device__ __forceinline__ void part_sync(int part) {
    asm volatile("bar.sync %0, %1;" ::"r"(part + 1), "n"(kThreads) : "memory");
}

// Pages of one sequence and kv head, [64][kHeadDim] each.
template <typename Element>
struct PageRows {
    const Element* k_pages;
    const Element* v_pages;
    const float* k_scales;  // float32 [pages, n_kv_heads] with e4m3, else null
    const float* v_scales;
    const int32* pages;
    int kv_head;
    int n_kv_heads;
};

// Two stages of bf16 key and value tiles: one loads while the other is used.
template <typename Element, int kHeadDim, int kKeys, int kThreads>
struct KeyRing {
    using Layout = TileLayout<kHeadDim>;
    static constexpr int kTileBytes = kKeys * kHeadDim * 2;
    static constexpr int kBytes = 4 * kTileBytes;
    uint32 address;
    uint32 scales;  // float32 [2 stages][2], with e4m3 pages

    // Starts filling a stage with keys key0 … of one page. Keys from key_end on become zeros.
    __device__ __forceinline__ void load(const PageRows<Element>& rows, int key0, int key_end, int stage,
                                         int thread) const {
        const int64 page_head = int64(rows.pages[key0 / kPageSize]) * rows.n_kv_heads + rows.kv_head;
        const int64 base = (page_head * kPageSize + key0 % kPageSize) * kHeadDim;
        const uint32 keys = address + stage * 2 * kTileBytes;
#pragma unroll
        for (int i = 0; i < kKeys * Layout::kChunks / kThreads; ++i) {
            const int chunk = i * kThreads + thread;
            const int row = chunk / Layout::kChunks;
            const bool valid = key0 + row < key_end;
            const uint32 target = keys + Layout::offset(row, chunk % Layout::kChunks);
            copy_async_16(target, rows.k_pages + base + chunk * 8, valid);
            copy_async_16(target + kTileBytes, rows.v_pages + base + chunk * 8, valid);
        }
    }

    // The stage's key tile, all of whose bytes have arrived; its value tile follows.
    __device__ __forceinline__ uint32 tile(int stage, int part, int thread) const {
        return address + stage * 2 * kTileBytes;
    }
};

// The same for e4m3 pages: two stages as they lie in memory, and one tile of bf16 made of the one in use.
// Scales are powers of two, so keys and values times their scales are exact in bf16.
template <int kHeadDim, int kKeys, int kThreads>
struct KeyRing<e4m3, kHeadDim, kKeys, kThreads> {
    using Layout = TileLayout<kHeadDim>;
    static constexpr int kTileBytes = kKeys * kHeadDim * 2;
    static constexpr int kBytes = 4 * kTileBytes;
    static constexpr int kRawBytes = kKeys * kHeadDim;
    static constexpr int kRowChunks = kHeadDim / 16;
    static constexpr int kSteps = kKeys * kRowChunks / kThreads;
    static_assert(kSteps > 0 && kKeys * kRowChunks % kThreads == 0);
    uint32 address;
    uint32 scales;

    __device__ __forceinline__ uint32 raw(int stage) const {
        return address + 2 * kTileBytes + stage * 2 * kRawBytes;
    }

    __device__ __forceinline__ void load(const PageRows<e4m3>& rows, int key0, int key_end, int stage,
                                         int thread) const {
        const int64 page_head = int64(rows.pages[key0 / kPageSize]) * rows.n_kv_heads + rows.kv_head;
        const int64 base = (page_head * kPageSize + key0 % kPageSize) * kHeadDim;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int chunk = i * kThreads + thread;
            const bool valid = key0 + chunk / kRowChunks < key_end;
            copy_async_16(raw(stage) + chunk * 16, rows.k_pages + base + chunk * 16, valid);
            copy_async_16(raw(stage) + kRawBytes + chunk * 16, rows.v_pages + base + chunk * 16, valid);
        }
        if (thread < 2)
            copy_async_4(scales + stage * 8 + thread * 4,
                         (thread == 0 ? rows.k_scales : rows.v_scales) + page_head);
    }

    // All threads of the part call it; what they read before is done with.
    __device__ __forceinline__ uint32 tile(int stage, int part, int thread) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const E4m3Widener widen(load_shared_float(scales + stage * 8 + which * 4));
#pragma unroll 2
            for (int i = 0; i < kSteps; ++i) {
                const int chunk = i * kThreads + thread;
                const int row = chunk / kRowChunks;
                const int first = chunk % kRowChunks * 2;
                const uint4 from = load_shared_16(raw(stage) + which * kRawBytes + chunk * 16);
                const uint32 target = address + which * kTileBytes;
                store_shared_16(target + Layout::offset(row, first), widen(from.x, from.y));
                store_shared_16(target + Layout::offset(row, first + 1), widen(from.z, from.w));
            }
        }
        part_sync<kThreads>(part);
        return address;
    }
};

}  // namespace slipstream
