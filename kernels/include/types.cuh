// Element types, 16-byte vectors and conversions. Knows no kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#ifndef INFINITY  // NVRTC has no <cmath>
#define INFINITY __int_as_float(0x7f800000)
#endif

namespace slipstream {

using bf16 = __nv_bfloat16;
using e4m3 = __nv_fp8_e4m3;
using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

// Largest finite e4m3.
constexpr float kE4m3Max = 448.0f;

// N elements that load and store as one access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T at[N];
};

__device__ __forceinline__ float to_float(float value) {
    return value;
}
__device__ __forceinline__ float to_float(bf16 value) {
    return __bfloat162float(value);
}

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
    return __float2bfloat16_rn(value);
}

// Two floats rounded into one register, `low` in the lower half.
__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32*>(&both);
}

// N consecutive elements as floats, in 16-byte accesses where N allows them.
template <int N, typename T>
__device__ __forceinline__ void load_floats(const T* source, float (&out)[N]) {
    constexpr int kWidth = (N * sizeof(T) < 16) ? N : 16 / sizeof(T);
    static_assert(N % kWidth == 0);
#pragma unroll
    for (int i = 0; i < N / kWidth; ++i) {
        const auto part = reinterpret_cast<const Vec<T, kWidth>*>(source)[i];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) out[i * kWidth + j] = to_float(part.at[j]);
    }
}

template <int N, typename T>
__device__ __forceinline__ void store_floats(T* target, const float (&values)[N]) {
    constexpr int kWidth = (N * sizeof(T) < 16) ? N : 16 / sizeof(T);
    static_assert(N % kWidth == 0);
#pragma unroll
    for (int i = 0; i < N / kWidth; ++i) {
        Vec<T, kWidth> part;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) part.at[j] = from_float<T>(values[i * kWidth + j]);
        reinterpret_cast<Vec<T, kWidth>*>(target)[i] = part;
    }
}

}  // namespace slipstream
