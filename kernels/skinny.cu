// Matrix products of at most 8 rows: y[rows, n] = x[rows, k] · W[n, k]ᵀ, with what stands around them in the same
// launch: the RMSNorm before it, the residual add or SwiGLU after it.
//
// Bound by the bytes of W, and for small W by latency. So each lane streams 16-byte pieces of W from global
// memory straight into the fragments of a tensor-core product (W's rows are the fragment's 16 rows, x's rows
// its 8 columns): no shared memory, no conversion. With dependent launch the first kDepth pieces of every lane
// are on their way before the kernel that makes x has ended.
//
// The order of k inside a product is free as long as W and x agree: lane l takes elements 8·(l%4) … +7 of each 32
// for both, which serve two steps of 16. A row's sum does not depend on how many rows there are.
#include "ptx.cuh"
#include "types.cuh"

using namespace slipstream;

namespace {

constexpr int kTileRows = 16;  // of W
constexpr int kColumns = 8;    // rows of x, padding included
constexpr int kStep = 32;      // elements of k that a warp takes at once

enum Finish { kStore = 0, kAdd = 1, kSwiGlu = 2 };

// 16 bytes that nobody reads again.
__device__ __forceinline__ uint4 load_once(const bf16* source) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source));
    return value;
}

// Both halves of 32 elements of k: rows l/4 and l/4 + 8 of W against row l/4 of x.
__device__ __forceinline__ void multiply(float (&acc)[4], const uint4& low, const uint4& high, const uint4& x) {
    const uint32 first[4] = {low.x, high.x, low.y, high.y};
    const uint32 second[4] = {low.z, high.z, low.w, high.w};
    mma_bf16(acc, first, x.x, x.y);
    mma_bf16(acc, second, x.z, x.w);
}

// Two elements of x times (offset + gain), rounded; their squares are added to `squares`.
__device__ __forceinline__ uint32 scaled(uint32 x, uint32 gain, float offset, float& squares) {
    const float2 value = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x));
    const float2 factor = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(gain));
    squares += value.x * value.x + value.y * value.y;
    return pack_bf16(value.x * (offset + factor.x), value.y * (offset + factor.y));
}

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + __expf(-x));
}

}  // namespace

// x: bf16 [rows ≤ 8, k]; weights: bf16 [n, k], with kSwiGlu [2·n, k], gates first; k % 32 = 0, n % 16 = 0,
// 2·n·k < 2^31.
// With kNorm x is normalised: x / rms(x) · (offset + gains), gains bf16 [k]; 1 / rms is applied to the sums.
// y: Out [rows, n]: the product; with kAdd added to what is there; with kSwiGlu silu(gate) · up.
// Grid (n / 16), 32·kWarps threads: the warps of a block share its k.
template <typename Out, int kFinish, bool kNorm, int kWarps, int kDepth, int kResident>
__global__ void __launch_bounds__(kWarps * 32, kResident)
    skinny_product(const bf16* __restrict__ x, const bf16* __restrict__ weights, const bf16* __restrict__ gains,
                   Out* y, int32 rows, int32 n, int32 k, float epsilon, float offset) {
    constexpr int kTiles = kFinish == kSwiGlu ? 2 : 1;
    __shared__ float parts[kWarps][kTiles][kColumns][kTileRows + 1];
    __shared__ float row_squares[kWarps][kColumns];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int first_row = blockIdx.x * kTileRows;
    const int within_step = lane % 4 * 8;
    const bf16* source = weights + int64(first_row + lane / 4) * k + within_step;
    const int to_high = 8 * k;
    const int to_up = n * k;
    const int steps = k / kStep;

    uint4 low[kDepth][kTiles], high[kDepth][kTiles], gain[kDepth], row[kDepth];
    const auto fetch = [&](int slot, int step) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const bf16* piece = source + tile * to_up + step * kStep;
            low[slot][tile] = load_once(piece);
            high[slot][tile] = load_once(piece + to_high);
        }
        if constexpr (kNorm) gain[slot] = *reinterpret_cast<const uint4*>(gains + step * kStep + within_step);
    };
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
        if (warp + i * kWarps < steps) fetch(i, warp + i * kWarps);
    wait_for_previous_kernels();
    allow_next_kernel();

    const bool has_row = lane / 4 < rows;
    const bf16* x_source = x + int64(lane / 4) * k + within_step;
    const auto fetch_x = [&](int slot, int step) {
        row[slot] = has_row ? *reinterpret_cast<const uint4*>(x_source + step * kStep) : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
        if (warp + i * kWarps < steps) fetch_x(i, warp + i * kWarps);

    float acc[kTiles][4] = {};
    float squares = 0.0f;
    for (int first = warp; first < steps; first += kDepth * kWarps) {
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            const int step = first + i * kWarps;
            if (step >= steps) break;
            uint4 values = row[i];
            if constexpr (kNorm) {
                values.x = scaled(values.x, gain[i].x, offset, squares);
                values.y = scaled(values.y, gain[i].y, offset, squares);
                values.z = scaled(values.z, gain[i].z, offset, squares);
                values.w = scaled(values.w, gain[i].w, offset, squares);
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) multiply(acc[tile], low[i][tile], high[i][tile], values);
            const int later = step + kDepth * kWarps;
            if (later < steps) {
                fetch(i, later);
                fetch_x(i, later);
            }
        }
    }

#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int j = 0; j < 4; ++j) parts[warp][tile][lane % 4 * 2 + (j & 1)][lane / 4 + j / 2 * 8] = acc[tile][j];
    if constexpr (kNorm) {
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        if (lane % 4 == 0) row_squares[warp][lane / 4] = squares;
    }
    __syncthreads();
    const int column = threadIdx.x / kTileRows;  // row of x
    const int within = threadIdx.x % kTileRows;
    if (column >= rows) return;
    float sums[kTiles] = {};
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) sums[tile] += parts[w][tile][column][within];
        if constexpr (kNorm) total += row_squares[w][column];
    }
    if constexpr (kNorm) {
        const float inverse = rsqrtf(total / k + epsilon);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) sums[tile] *= inverse;
    }
    Out* target = y + int64(column) * n + first_row + within;
    float value = sums[0];
    if constexpr (kFinish == kSwiGlu) value = silu(sums[0]) * sums[kTiles - 1];
    if constexpr (kFinish == kAdd) value += to_float(*target);
    *target = from_float<Out>(value);
}
