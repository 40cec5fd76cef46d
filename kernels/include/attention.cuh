// What both attention kernels share: swizzled shared tiles, fragment loads, online softmax.
//
// A tile is [rows][kHeadDim] bf16 in 16-byte chunks; chunk c of row r sits at c ^ (r % 8), so that ldmatrix'
// eight row addresses fall into different banks. Tiles start at multiples of kTileAlignment: then a lane's
// address for columns 16·step … is its address for step 0 with one exclusive or, and needs no register.
#pragma once

#include "ptx.cuh"
#include "types.cuh"

namespace slipstream {

constexpr int kPageSize = 64;
constexpr int kTileAlignment = 1024;
constexpr float kLog2E = 1.4426950408889634f;

template <int kHeadDim>
struct TileLayout {
    static constexpr int kChunks = kHeadDim / 8;
    static constexpr int kRowBytes = kHeadDim * 2;

    static __device__ __forceinline__ uint32 offset(int row, int chunk) {
        return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
    }
};

// Where a lane finds its row of an A operand (16 rows × 16 columns), and of values taken as a B operand (16
// keys × 16 columns, transposed on load), relative to the tile.
template <int kHeadDim>
__device__ __forceinline__ uint32 lane_offset_rows(int lane) {
    return TileLayout<kHeadDim>::offset(lane % 16, lane / 16);
}

// The same for keys as a B operand: registers 0 and 1 are the first eight keys, 2 and 3 the others.
template <int kHeadDim>
__device__ __forceinline__ uint32 lane_offset_keys(int lane) {
    return TileLayout<kHeadDim>::offset(lane % 8 + (lane / 16) * 8, (lane / 8) % 2);
}

// The address `row0` rows (a multiple of 16) and 16·step columns further on.
template <int kHeadDim>
__device__ __forceinline__ uint32 step_address(uint32 lane_address, int row0, int step) {
    return (lane_address ^ (step * 32)) + row0 * TileLayout<kHeadDim>::kRowBytes;
}

// Running maximum and sum of one query row. `sum` is this lane's part until the row is done.
struct OnlineSoftmax {
    float maximum = -INFINITY;
    float sum = 0.0f;

    // Takes a tile's row maximum (of this lane); returns the factor for what was accumulated before.
    __device__ __forceinline__ float raise(float tile_maximum, float unit) {
        tile_maximum = fmaxf(tile_maximum, __shfl_xor_sync(0xffffffffu, tile_maximum, 1));
        tile_maximum = fmaxf(tile_maximum, __shfl_xor_sync(0xffffffffu, tile_maximum, 2));
        const float raised = fmaxf(maximum, tile_maximum);
        const float factor = maximum == raised ? 1.0f : exp2_fast((maximum - raised) * unit);
        maximum = raised;
        sum *= factor;
        return factor;
    }

    // What scores are taken relative to, in log2; finite also for a row that has seen no key.
    __device__ __forceinline__ float base(float unit) const {
        return maximum == -INFINITY ? 0.0f : maximum * unit;
    }

    // Takes in a row's maximum and sum over other keys; returns the factors for what the two accumulated.
    __device__ __forceinline__ float2 join(float other_maximum, float other_sum, float unit) {
        const float highest = fmaxf(maximum, other_maximum);
        const float2 factors =
            make_float2(maximum == highest ? 1.0f : exp2_fast((maximum - highest) * unit),
                        other_maximum == highest ? 1.0f : exp2_fast((other_maximum - highest) * unit));
        maximum = highest;
        sum = sum * factors.x + other_sum * factors.y;
        return factors;
    }

    __device__ __forceinline__ float total() const {
        const float pair = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
        return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
    }
};

// Raises the maxima of rows lane/4 and lane/4 + 8 by a tile's scores. factors: for what they have accumulated.
template <int kPairs>
__device__ __forceinline__ void raise_rows(const float (&scores)[kPairs][4], OnlineSoftmax (&rows)[2],
                                           float unit, float (&factors)[2]) {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) highest[j / 2] = fmaxf(highest[j / 2], scores[n][j]);
    factors[0] = rows[0].raise(highest[0], unit);
    factors[1] = rows[1].raise(highest[1], unit);
}

// Turns scores into weights relative to the rows' maxima, and sums them.
template <int kPairs>
__device__ __forceinline__ void weigh_scores(float (&scores)[kPairs][4], OnlineSoftmax (&rows)[2], float unit) {
    const float bases[2] = {rows[0].base(unit), rows[1].base(unit)};
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            scores[n][j] = exp2_fast(fmaf(scores[n][j], unit, -bases[j / 2]));
            rows[j / 2].sum += scores[n][j];
        }
}

// Multiplies what the rows have accumulated, if a factor of the warp's rows is not 1.
template <int kColumns>
__device__ __forceinline__ void rescale(float (&acc)[kColumns][4], const float (&factors)[2]) {
    if (!__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[n][j] *= factors[j / 2];
}

// Turns a tile's scores into weights: raises the maxima of rows lane/4 and lane/4 + 8, rescales what the
// rows have accumulated, and sums the weights.
template <int kPairs, int kColumns>
__device__ __forceinline__ void weigh(float (&scores)[kPairs][4], float (&acc)[kColumns][4],
                                      OnlineSoftmax (&rows)[2], float unit) {
    float factors[2];
    raise_rows(scores, rows, unit, factors);
    rescale(acc, factors);
    weigh_scores(scores, rows, unit);
}

// Weights of 16 keys as an A operand.
template <int kPairs>
__device__ __forceinline__ void pack_weights(uint32 (&out)[4], const float (&scores)[kPairs][4], int pair) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
        out[j] = pack_bf16(scores[2 * pair + j / 2][(j & 1) * 2], scores[2 * pair + j / 2][(j & 1) * 2 + 1]);
}

}  // namespace slipstream
