// Rows of e4m3 with a float32 scale each: value = scale · e4m3. Knows no kernel.
#pragma once

#include "types.cuh"

namespace slipstream {

// The scale that makes a row's largest magnitude 448; 1 for a row of zeros. Never so small that its
// reciprocal overflows.
__device__ __forceinline__ float fp8_scale(float largest) {
    constexpr float kLeastNormal = 1.17549435e-38f;
    return largest > 0.0f ? fmaxf(__fdiv_rn(largest, kE4m3Max), kLeastNormal) : 1.0f;
}

// Rounds to the nearest e4m3, ties to even; ±448 beyond; NaN stays NaN.
template <int N>
__device__ __forceinline__ void store_e4m3(e4m3* target, const float (&values)[N]) {
    static_assert(N % 2 == 0);
    Vec<__nv_fp8x2_storage_t, N / 2> packed;
#pragma unroll
    for (int j = 0; j < N / 2; ++j)
        packed.at[j] = __nv_cvt_float2_to_fp8x2(make_float2(values[2 * j], values[2 * j + 1]), __NV_SATFINITE,
                                                __NV_E4M3);
    *reinterpret_cast<Vec<__nv_fp8x2_storage_t, N / 2>*>(target) = packed;
}

}  // namespace slipstream
