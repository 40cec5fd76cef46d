// Keys, weights and random numbers of sampling. Knows no kernel.
#pragma once

#include "types.cuh"

namespace slipstream {

constexpr int kChunk = 4096;  // vocabulary entries a block of the scanning kernels handles

// Maps floats to unsigned integers in the same order (−inf lowest). Not for NaN.
__device__ __forceinline__ uint32 ordered_key(float value) {
    const uint32 bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float key_value(uint32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Larger for a larger value, and among equal values for a lower id.
__device__ __forceinline__ uint64 ranked(float value, int32 id) {
    // −0 and +0 are equal values
    return (uint64(ordered_key(value + 0.0f)) << 32) | uint32(~id);
}

__device__ __forceinline__ float ranked_value(uint64 key) {
    return key_value(uint32(key >> 32));
}
__device__ __forceinline__ int32 ranked_id(uint64 key) {
    return int32(~uint32(key));
}

// A row's tempered softmax: the float32 weight exp((z − peak) / temperature) of a logit, as the definition of
// the draw has it. The division is a product and one correction: correctly rounded, for a third of the price.
struct Temper {
    float peak;
    float temperature;
    float inverse;
    float lowest;         // differences below weigh nothing
    float bins_per_unit;  // for bin()

    __device__ __forceinline__ Temper(float peak, float temperature, float bins_per_nat)
        : peak(peak),
          temperature(temperature),
          inverse(1.0f / temperature),
          lowest(-200.0f * temperature),
          bins_per_unit(bins_per_nat / temperature) {}

    __device__ __forceinline__ float weight(float z) const {
        const float difference = fmaxf(z - peak, lowest);
        const float quotient = difference * inverse;
        return expf(fmaf(fmaf(-quotient, temperature, difference), inverse, quotient));
    }
};

// Weights are summed as integers in units of 2^−44: any order gives the same bits, and 2^18 weights of at
// most 1 fit in 64 bits.
__device__ __forceinline__ uint64 fixed_weight(float weight) {
    return __float2ull_rn(weight * 17592186044416.0f);
}

// First word of Philox4x32-10 for counter (index, 0) and key `seed`.
__device__ __forceinline__ uint32 philox_word(uint64 seed, uint64 index) {
    uint32 c0 = uint32(index), c1 = uint32(index >> 32), c2 = 0, c3 = 0;
    uint32 k0 = uint32(seed), k1 = uint32(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64 first = uint64(0xD2511F53u) * c0;
        const uint64 second = uint64(0xCD9E8D57u) * c2;
        const uint32 n0 = uint32(second >> 32) ^ c1 ^ k0;
        const uint32 n2 = uint32(first >> 32) ^ c3 ^ k1;
        c1 = uint32(second);
        c3 = uint32(first);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

// The largest integer that is not above u · total, with u = (word + ½) / 2^32: a running sum exceeds
// u · total exactly when it exceeds this.
__device__ __forceinline__ uint64 draw_target(uint64 total, uint32 word) {
    const uint64 numerator = 2 * uint64(word) + 1;  // over 2^33
    const uint64 high = __umul64hi(total, numerator);
    return (high << 31) | ((total * numerator) >> 33);
}

}  // namespace slipstream
