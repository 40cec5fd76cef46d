// What products of few rows have in common, however their weights come: the norm before, and what follows.
#pragma once

#include "types.cuh"

namespace slipstream {

// What becomes of the sums: kernels/fused.py.
enum Finish { kStore = 0, kAdd = 1, kSwiGlu = 2 };

// 8 elements of x times (offset + gains), rounded; their squares are added to `squares`.
__device__ __forceinline__ uint4 scaled(const uint4& x, const uint4& gains, float offset, float& squares) {
    const auto pair = [&](uint32 x_pair, uint32 gain_pair) {
        const float2 value = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x_pair));
        const float2 factor = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(gain_pair));
        squares += value.x * value.x + value.y * value.y;
        return pack_bf16(value.x * (offset + factor.x), value.y * (offset + factor.y));
    };
    return make_uint4(pair(x.x, gains.x), pair(x.y, gains.y), pair(x.z, gains.z), pair(x.w, gains.w));
}

// What another kernel has just written.
__device__ __forceinline__ uint4 load_16(const bf16* source) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source)
                 : "memory");
    return value;
}

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + __expf(-x));
}

}  // namespace slipstream
