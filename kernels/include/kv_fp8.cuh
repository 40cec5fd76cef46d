// KV pages in e4m3 with a scale per page and kv head: value = scale · e4m3, scales are powers of two.
//
// The write of a page's first position sets its scale to the smallest that holds what is written; a later write
// may raise it, and then what the page holds is divided by the same power of two.
#pragma once

#include "types.cuh"

namespace slipstream {

// The smallest power of two, from 2^−32 on, with magnitude ≤ 448 · scale: 448 = 1.75 · 2^8.
__device__ __forceinline__ float scale_for(float magnitude) {
    const int bits = __float_as_int(magnitude);
    const int exponent = (bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000);
    return __int_as_float(max(exponent, 127 - 32) << 23);
}

// The inverse of a power of two, exactly.
__device__ __forceinline__ float inverse_of(float power) {
    return __int_as_float((254 << 23) - __float_as_int(power));
}

template <int N>
__device__ __forceinline__ Vec<e4m3, N> quantised(const float (&x)[N], float inverse) {
    Vec<e4m3, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.at[j] = e4m3(x[j] * inverse);
    return out;
}

// 16 e4m3 times a power of two, rounded again.
__device__ __forceinline__ uint4 rescaled(uint4 packed, float factor) {
    auto& values = reinterpret_cast<Vec<e4m3, 16>&>(packed);
#pragma unroll
    for (int j = 0; j < 16; ++j) values.at[j] = e4m3(float(values.at[j]) * factor);
    return packed;
}

// Two e4m3 of the lower or upper half of a register as f16, exactly.
__device__ __forceinline__ uint32 halves_of(uint32 packed, bool upper) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(upper ? packed >> 16 : packed);
    const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    return uint32(both.x) | uint32(both.y) << 16;
}

}  // namespace slipstream
