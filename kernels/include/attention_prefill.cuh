// What the prefill attention kernels share: query tiles, masks, the merge of a block's parts, and the way
// back out. Knows no page and no schedule.
#pragma once

#include "attention.cuh"

namespace slipstream {

// One block's rows. Made by the host: kernels/attention_prefill.py.
struct alignas(16) QueryTile {
    int32 slot;
    int32 segment_row;  // row of the segment's first token in query and out
    int32 segment_length;
    int32 start;         // position of that token
    int32 first_packed;  // this tile's first packed row
    int32 unused[3];

    // The row of [rows · n_heads] that a packed row is.
    __device__ __forceinline__ int64 head_row(int packed, int n_heads, int kv_head, int group) const {
        return int64(segment_row + packed / group) * n_heads + kv_head * group + packed % group;
    }
};

// Fills kRows rows of a query tile with kThreads threads. Packed rows past the segment become zeros.
template <int kHeadDim, int kRows, int kThreads>
__device__ __forceinline__ void load_queries(const bf16* query, const QueryTile& tile, uint32 target,
                                             int first_packed, int thread, int n_heads, int kv_head,
                                             int group) {
    using Layout = TileLayout<kHeadDim>;
#pragma unroll 4
    for (int i = thread; i < kRows * Layout::kChunks; i += kThreads) {
        const int row = i / Layout::kChunks;
        const int chunk = i % Layout::kChunks;
        const int packed = first_packed + row;
        const bool valid = packed / group < tile.segment_length;
        const int64 head_row =
            tile.head_row(valid ? packed : tile.first_packed, n_heads, kv_head, group);
        copy_async_16(target + Layout::offset(row, chunk), query + head_row * kHeadDim + chunk * 8, valid);
    }
}

// Puts a warp's 16 rows of sums, divided by their weights' total, into shared memory as bf16.
template <int kHeadDim>
__device__ __forceinline__ void place_rows(unsigned char* shared, int lane, const float (&acc)[kHeadDim / 8][4],
                                           const OnlineSoftmax (&softmax)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float total = softmax[half].total();
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        const int row = half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            const uint32 both = pack_bf16(acc[n][half * 2] * inverse, acc[n][half * 2 + 1] * inverse);
            *reinterpret_cast<uint32*>(shared + TileLayout<kHeadDim>::offset(row, n) + (lane % 4) * 4) = both;
        }
    }
}

// Writes 16 rows that one warp has put into shared memory to where they belong in `out`: packed row
// first_packed and those behind it.
template <int kHeadDim>
__device__ __forceinline__ void store_rows(bf16* out, const QueryTile& tile, const unsigned char* shared,
                                           int first_packed, int lane, int n_heads, int kv_head, int group) {
    using Layout = TileLayout<kHeadDim>;
#pragma unroll 4
    for (int i = lane; i < 16 * Layout::kChunks; i += 32) {
        const int row = i / Layout::kChunks;
        const int chunk = i % Layout::kChunks;
        const int packed = first_packed + row;
        if (packed / group >= tile.segment_length) continue;
        *reinterpret_cast<uint4*>(out + tile.head_row(packed, n_heads, kv_head, group) * kHeadDim +
                                  chunk * 8) =
            *reinterpret_cast<const uint4*>(shared + Layout::offset(row, chunk));
    }
}

// Sets the scores of keys that their rows may not see to −inf. Only tiles at the ends of a row's range need
// it. Keys before `first_real` are none at all.
template <int kPairs>
__device__ __forceinline__ void hide_unseen(float (&scores)[kPairs][4], int start, int packed, int group,
                                            int first_key, int window, int first_real = 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int position = start + (packed + half * 8) / group;
        const int oldest = max(window > 0 ? position - window : -1, first_real - 1);
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int key = first_key + n * 8 + j;
                if (key > position || key <= oldest) scores[n][half * 2 + j] = -INFINITY;
            }
    }
}

// Adds to part 0's sums those of part 1, which saw other keys: through `shared`, thread by thread. All
// threads of both parts call it.
template <int kTilesM, int kColumns, int kThreads>
__device__ __forceinline__ void merge_parts(float (&acc)[kTilesM][kColumns][4],
                                            OnlineSoftmax (&softmax)[kTilesM][2], unsigned char* shared,
                                            int part, int thread, float unit) {
    float4* sums = reinterpret_cast<float4*>(shared);
    float4* rows = sums + kTilesM * kColumns * kThreads;
    __syncthreads();
    if (part == 1) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n)
                sums[(m * kColumns + n) * kThreads + thread] =
                    make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
            rows[m * kThreads + thread] = make_float4(softmax[m][0].maximum, softmax[m][0].sum,
                                                      softmax[m][1].maximum, softmax[m][1].sum);
        }
    }
    __syncthreads();
    if (part == 1) return;
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
        const float4 row = rows[m * kThreads + thread];
        const float2 factors[2] = {softmax[m][0].join(row.x, row.y, unit),
                                   softmax[m][1].join(row.z, row.w, unit)};
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            const float4 other = sums[(m * kColumns + n) * kThreads + thread];
            const float values[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                acc[m][n][j] = acc[m][n][j] * factors[j / 2].x + values[j] * factors[j / 2].y;
        }
    }
}

}  // namespace slipstream
