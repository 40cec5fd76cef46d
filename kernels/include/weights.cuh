// Weight matrices of a product of few rows: how a lane brings its part of 16 × 64 tiles into shared memory, and
// how it multiplies that part with x on tensor cores. Knows nothing of what becomes of the sums.
//
// A lane reads back only what it has copied itself, so a ring of tiles in shared memory needs no barrier: it is
// a lane's registers, but deeper. The order of k inside a product is free as long as W and x agree: each type
// takes the 16 elements of a tile that are cheapest to load, and says so in x_offset.
#pragma once

#include "ptx.cuh"
#include "types.cuh"

namespace slipstream {

constexpr int kTileRows = 16;     // of W: the rows of a tensor-core product
constexpr int kTileColumns = 64;  // of k

// 8 bytes from global to shared memory; with `valid` false the target is zeroed.
__device__ __forceinline__ void copy_async_8(uint32 target, const void* source, bool valid) {
    const int bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(bytes)
                 : "memory");
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

// A constant that stays in a register, which ptxas does not know: an instruction takes one immediate only, and the
// other would be made anew for each. k > 0.
__device__ __forceinline__ uint32 kept(uint32 value, int32 k) {
    return value ^ uint32(k) >> 31;
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
    static constexpr int kLaneBytes = 64;  // of a tile
    static constexpr int kRowPad = 32;     // elements between staged rows of x, against bank conflicts
    static constexpr int kHalfOffset = 32;
    static constexpr bool kRowScales = false;
    const bf16* source;  // of the lane
    int32 k;

    struct Rows {
        const bf16* low;
        const bf16* high;
    };

    __device__ __forceinline__ Bf16Weights(const void* weights, const void*, int32 k, int lane)
        : source(static_cast<const bf16*>(weights) + int64(lane / 4) * k + x_offset(lane)), k(k) {}

    // The first of a lane's 16 elements; 8 more begin kHalfOffset further on.
    static __device__ __forceinline__ int x_offset(int lane) {
        return lane % 4 * 8;
    }

    __device__ __forceinline__ Rows rows(int tile) const {
        const bf16* low = source + int64(tile) * kTileRows * k;
        return {low, low + 8 * k};
    }

    // Tiles first … first + kCount − 1, all whole.
    template <int kCount>
    __device__ __forceinline__ void fetch(uint32 target, const Rows& rows, int first) const {
        const bf16* low = rows.low + first * kTileColumns;
        const bf16* high = rows.high + first * kTileColumns;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const uint32 place = target + i * kLaneBytes * kThreads;
            copy_async_16(place, low + i * kTileColumns, true);
            copy_async_16(place + kThreads * 16, high + i * kTileColumns, true);
            copy_async_16(place + kThreads * 32, low + i * kTileColumns + 32, true);
            copy_async_16(place + kThreads * 48, high + i * kTileColumns + 32, true);
        }
    }

    // One that k may cut, or that lies behind it: what is not there becomes 0.
    __device__ __forceinline__ void fetch_cut(uint32 target, const Rows& rows, int step) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int place = step * kTileColumns + half * kHalfOffset;
            const bool valid = place < k;
            copy_async_16(target + kThreads * 32 * half, rows.low + (valid ? place : 0), valid);
            copy_async_16(target + kThreads * (32 * half + 16), rows.high + (valid ? place : 0), valid);
        }
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
    static constexpr int kHalfOffset = 8;
    static constexpr bool kRowScales = true;
    const unsigned char* source;
    int32 k;
    uint32 magnitudes;
    uint32 signs;

    struct Rows {
        const unsigned char* low;
        const unsigned char* high;
    };

    __device__ __forceinline__ Fp8Weights(const void* weights, const void*, int32 k, int lane)
        : source(static_cast<const unsigned char*>(weights) + int64(lane / 4) * k + x_offset(lane)),
          k(k),
          magnitudes(kept(0x07f007f0u, k)),
          signs(kept(0x80008000u, k)) {}

    static __device__ __forceinline__ int x_offset(int lane) {
        return lane % 4 * 16;
    }

    __device__ __forceinline__ Rows rows(int tile) const {
        const unsigned char* low = source + int64(tile) * kTileRows * k;
        return {low, low + 8 * k};
    }

    template <int kCount>
    __device__ __forceinline__ void fetch(uint32 target, const Rows& rows, int first) const {
        const unsigned char* low = rows.low + first * kTileColumns;
        const unsigned char* high = rows.high + first * kTileColumns;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            copy_async_16(target + i * kLaneBytes * kThreads, low + i * kTileColumns, true);
            copy_async_16(target + i * kLaneBytes * kThreads + kThreads * 16, high + i * kTileColumns, true);
        }
    }

    __device__ __forceinline__ void fetch_cut(uint32 target, const Rows& rows, int step) const {
        const bool valid = step * kTileColumns + x_offset(threadIdx.x % 32) < k;
        const int place = valid ? step * kTileColumns : 0;
        copy_async_16(target, rows.low + place, valid);
        copy_async_16(target + kThreads * 16, rows.high + place, valid);
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
    __device__ __forceinline__ uint32 pair(uint32 word) const {
        const uint32 spread = __byte_perm(word, 0, kPair ? 0x3424 : 0x1404);
        const uint32 moved = (spread & signs) | (spread >> 4 & magnitudes);
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
    static constexpr int kHalfOffset = 32;
    static constexpr bool kRowScales = false;
    const unsigned char* quants;
    const unsigned char* scales;
    int32 steps;
    uint32 nibbles;

    struct Rows {
        const unsigned char* quants;
        const unsigned char* scales;
    };

    __device__ __forceinline__ Q4Weights(const void* weights, const void* scales, int32 k, int lane)
        : quants(static_cast<const unsigned char*>(weights) + lane * 16),
          scales(static_cast<const unsigned char*>(scales) + lane / 4 * 8),
          steps((k + kTileColumns - 1) / kTileColumns),
          nibbles(kept(0x000f000fu, k)) {}

    static __device__ __forceinline__ int x_offset(int lane) {
        return lane % 4 * 8;
    }

    __device__ __forceinline__ Rows rows(int tile) const {
        const int64 first = int64(tile) * steps;
        return {quants + first * 512, scales + first * 64};
    }

    template <int kCount>
    __device__ __forceinline__ void fetch(uint32 target, const Rows& rows, int first) const {
        const unsigned char* piece = rows.quants + first * 512;
        const unsigned char* scale = rows.scales + first * 64;
        const uint32 narrow = target - threadIdx.x * 8 + kThreads * 16;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            copy_async_16(target + i * kLaneBytes * kThreads, piece + i * 512, true);
            copy_async_8(narrow + i * kLaneBytes * kThreads, scale + i * 64, true);
        }
    }

    __device__ __forceinline__ void fetch_cut(uint32 target, const Rows& rows, int step) const {
        const bool valid = step < steps;
        const int place = valid ? step : 0;
        copy_async_16(target, rows.quants + place * 512, valid);
        copy_async_8(target - threadIdx.x * 8 + kThreads * 16, rows.scales + place * 64, valid);
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
    __device__ __forceinline__ uint32 pair(uint32 word) const {
        const uint32 biased = (word & nibbles) | 0x43004300u;
        const __nv_bfloat162 value =
            __hsub2(reinterpret_cast<const __nv_bfloat162&>(biased), __float2bfloat162_rn(136.0f));
        return reinterpret_cast<const uint32&>(value);
    }
};

}  // namespace slipstream
