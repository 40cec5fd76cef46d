// One head of a raw q|k|v row on its way to attention: scale, bias, RMSNorm, rotary embedding. A warp takes a
// head, each lane kHeadDim / 32 neighbouring elements of it. Knows no pages.
#pragma once

#include "reduce.cuh"
#include "types.cuh"

namespace slipstream {

// What turns raw sums into a layer's q, k and v. All but row_scale stay the same from step to step.
struct HeadWeights {
    const bf16* bias;           // of a row of q|k|v, or null
    const float* weight_scale;  // float32 of a row of q|k|v, or null
    const float* row_scale;     // float32 [rows], with weight_scale
    const bf16* q_norm;         // [kHeadDim], or null
    const bf16* k_norm;
    float epsilon;
    float norm_offset;
};

// x ← x · (weight scale · row scale) + bias, for a lane's elements. May be fetched before the raw sums exist.
template <int kEach>
struct Affine {
    float factor[kEach];
    float added[kEach];

    // column: of the lane's first element in a row of q|k|v.
    __device__ __forceinline__ void fetch(const HeadWeights& weights, int column) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            factor[j] = 1.0f;
            added[j] = 0.0f;
        }
        if (weights.weight_scale) load_floats(weights.weight_scale + column, factor);
        if (weights.bias) load_floats(weights.bias + column, added);
    }

    __device__ __forceinline__ void apply(float (&x)[kEach], float row_scale) const {
#pragma unroll
        for (int j = 0; j < kEach; ++j) x[j] = x[j] * (factor[j] * row_scale) + added[j];
    }
};

// x ← x / rms(x) · (offset + weight) over the head's kHeadDim elements, kEach of them in each lane.
template <int kHeadDim, int kEach>
__device__ __forceinline__ void normalise_head(float (&x)[kEach], const float (&weight)[kEach], float offset,
                                               float epsilon) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) squares += x[j] * x[j];
    const float inverse = rsqrtf(warp_reduce(squares, Sum{}) / kHeadDim + epsilon);
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] *= inverse * (offset + weight[j]);
}

// Rotates element i < half with element i + half (the "rotate half" pairing); elements from 2·half on stay.
// Both partners sit at the same place of lanes half / kEach apart.
template <int kEach>
struct Turn {
    float cosine[kEach];
    float sine[kEach];  // with the sign of this lane's half
    int partner;

    __device__ __forceinline__ Turn(const float* cosines, const float* sines, int half, int lane) {
        const int distance = half / kEach;
        const bool first = lane < distance;
        const bool turns = lane < 2 * distance;
        partner = first ? lane + distance : (turns ? lane - distance : lane);
        const int column = (first ? lane : lane - distance) * kEach;
        if (turns) {
            load_floats(cosines + column, cosine);
            load_floats(sines + column, sine);
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            cosine[j] = turns ? cosine[j] : 1.0f;
            sine[j] = turns ? (first ? -sine[j] : sine[j]) : 0.0f;
        }
    }

    __device__ __forceinline__ void apply(float (&x)[kEach]) const {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const float other = __shfl_sync(0xffffffffu, x[j], partner);
            x[j] = x[j] * cosine[j] + other * sine[j];
        }
    }
};

}  // namespace slipstream
