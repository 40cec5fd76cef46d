// Weight matrices of a product of few rows: how a lane brings its part of a 16 × 64 tile into shared memory, and
// how it multiplies that part with x on tensor cores. Knows nothing of what becomes of the sums.
//
// A lane reads back only what it has copied itself, so a ring of tiles in shared memory needs no barrier: it is
// a lane's registers, but deeper. The order of k inside a product is free as long as W and x agree: each type
// takes the 16 elements of a step that are cheapest to load, and says so in x_offset.
#pragma once

#include "ptx.cuh"
#include "types.cuh"

namespace slipstream {

constexpr int kTileRows = 16;   // of W: the rows of a tensor-core product
constexpr int kTileSteps = 64;  // elements of k in a tile

__device__ __forceinline__ void copy_async_8(uint32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void load_shared_16(uint32 (&out)[4], uint32 address) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_shared_8(uint32 (&out)[2], uint32 address) {
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(address) : "memory");
}

// Rows l/4 and l/4 + 8 of W, 8 elements of k each, against row l/4 of x.
__device__ __forceinline__ void multiply_8(float (&acc)[4], const uint32 (&low)[4], const uint32 (&high)[4],
                                           const uint4& x) {
    const uint32 first[4] = {low[0], high[0], low[1], high[1]};
    const uint32 second[4] = {low[2], high[2], low[3], high[3]};
    mma_bf16(acc, first, x.x, x.y);
    mma_bf16(acc, second, x.z, x.w);
}

// bf16 [n, k], row-major.
template <int kThreads>
struct Bf16Weights {
    static constexpr int kLaneBytes = 64;
    static constexpr int kRowPad = 32;  // elements between staged rows of x, against bank conflicts
    static constexpr bool kRowScales = false;
    const bf16* source;  // of the lane
    int32 k;

    __device__ __forceinline__ Bf16Weights(const void* weights, const void*, int32 k, int lane)
        : source(static_cast<const bf16*>(weights) + int64(lane / 4) * k + lane % 4 * 8), k(k) {}

    static __device__ __forceinline__ int x_offset(int lane, int half) {
        return half * 32 + lane % 4 * 8;
    }

    __device__ __forceinline__ void fetch(uint32 target, int tile, int step) const {
        const bf16* piece = source + int64(tile) * kTileRows * k + step * kTileSteps;
        const bool whole = step * kTileSteps + 32 < k;
        copy_async_16(target, piece, true);
        copy_async_16(target + kThreads * 16, piece + 8 * k, true);
        copy_async_16(target + kThreads * 32, whole ? piece + 32 : piece, whole);
        copy_async_16(target + kThreads * 48, whole ? piece + 8 * k + 32 : piece, whole);
    }

    __device__ __forceinline__ void multiply(float (&acc)[4], uint32 tile, const uint4 (&x)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32 low[4], high[4];
            load_shared_16(low, tile + kThreads * 32 * half);
            load_shared_16(high, tile + kThreads * 32 * half + kThreads * 16);
            multiply_8(acc, low, high, x[half]);
        }
    }
};

// e4m3 [n, k], row-major; the scale of each row is the caller's.
template <int kThreads>
struct Fp8Weights {
    static constexpr int kLaneBytes = 32;
    static constexpr int kRowPad = 8;
    static constexpr bool kRowScales = true;
    const unsigned char* source;
    int32 k;
    int32 within;

    __device__ __forceinline__ Fp8Weights(const void* weights, const void*, int32 k, int lane)
        : source(static_cast<const unsigned char*>(weights) + int64(lane / 4) * k + lane % 4 * 16),
          k(k),
          within(lane % 4 * 16) {}

    static __device__ __forceinline__ int x_offset(int lane, int half) {
        return lane % 4 * 16 + half * 8;
    }

    __device__ __forceinline__ void fetch(uint32 target, int tile, int step) const {
        const unsigned char* piece = source + int64(tile) * kTileRows * k + step * kTileSteps;
        const bool valid = step * kTileSteps + within < k;
        copy_async_16(target, valid ? piece : source, valid);
        copy_async_16(target + kThreads * 16, valid ? piece + 8 * k : source, valid);
    }

    __device__ __forceinline__ void multiply(float (&acc)[4], uint32 tile, const uint4 (&x)[2]) const {
        uint32 low[4], high[4];
        load_shared_16(low, tile);
        load_shared_16(high, tile + kThreads * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32 first[4] = {pair<0>(low[2 * half]), pair<1>(low[2 * half]), pair<0>(low[2 * half + 1]),
                                     pair<1>(low[2 * half + 1])};
            const uint32 second[4] = {pair<0>(high[2 * half]), pair<1>(high[2 * half]),
                                      pair<0>(high[2 * half + 1]), pair<1>(high[2 * half + 1])};
            multiply_8(acc, first, second, x[half]);
        }
    }

    // Two neighbours of a word as bf16, exactly: exponent and mantissa move to their places, and a product with
    // 2^120 corrects the bias (subnormals too). NaN becomes ±480.
    template <int kPair>
    static __device__ __forceinline__ uint32 pair(uint32 word) {
        const uint32 spread = __byte_perm(word, 0, kPair ? 0x3424 : 0x1404);
        const uint32 moved = (spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u);
        const __nv_bfloat162 value =
            __hmul2(reinterpret_cast<const __nv_bfloat162&>(moved), __float2bfloat162_rn(0x1p120f));
        return reinterpret_cast<const uint32&>(value);
    }
};

// q4_0 in tiles: 512 bytes of nibbles and 64 of f16 scales each, as kernels/q4.py says.
template <int kThreads>
struct Q4Weights {
    static constexpr int kLaneBytes = 24;
    static constexpr int kRowPad = 32;
    static constexpr bool kRowScales = false;
    const unsigned char* quants;
    const unsigned char* scales;
    int32 steps;

    __device__ __forceinline__ Q4Weights(const void* weights, const void* scales, int32 k, int lane)
        : quants(static_cast<const unsigned char*>(weights) + lane * 16),
          scales(static_cast<const unsigned char*>(scales) + lane / 4 * 8),
          steps((k + kTileSteps - 1) / kTileSteps) {}

    static __device__ __forceinline__ int x_offset(int lane, int half) {
        return half * 32 + lane % 4 * 8;
    }

    __device__ __forceinline__ void fetch(uint32 target, int tile, int step) const {
        const int64 index = int64(tile) * steps + step;
        copy_async_16(target, quants + index * 512, true);
        copy_async_8(target - threadIdx.x * 8 + kThreads * 16, scales + index * 64);
    }

    // Each block of 32: an exact product of x with integers, scaled into the sum.
    __device__ __forceinline__ void multiply(float (&acc)[4], uint32 tile, const uint4 (&x)[2]) const {
        uint32 words[4], scale[2];
        load_shared_16(words, tile);
        load_shared_8(scale, tile - threadIdx.x * 8 + kThreads * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32 low[4], high[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low[i] = pair(words[2 * half] >> (4 * i));
                high[i] = pair(words[2 * half + 1] >> (4 * i));
            }
            float block[4] = {};
            multiply_8(block, low, high, x[half]);
            const float2 factors = __half22float2(reinterpret_cast<const __half2&>(scale[half]));
            acc[0] += factors.x * block[0];
            acc[1] += factors.x * block[1];
            acc[2] += factors.y * block[2];
            acc[3] += factors.y * block[3];
        }
    }

    // q − 8 of the lowest nibble of each half, as bf16: 128 + q is a bit pattern, the difference exact.
    static __device__ __forceinline__ uint32 pair(uint32 word) {
        const uint32 biased = (word & 0x000f000fu) | 0x43004300u;
        const __nv_bfloat162 value =
            __hsub2(reinterpret_cast<const __nv_bfloat162&>(biased), __float2bfloat162_rn(136.0f));
        return reinterpret_cast<const uint32&>(value);
    }
};

}  // namespace slipstream
