// The parts of one-launch decode attention that depend on the pages' type: queries in shared memory, a tile's
// arithmetic in bf16 or e4m3, a warp's result. Knows no grid.
#pragma once

#include "attention_decode.cuh"
#include "kv_fp8.cuh"

namespace slipstream {

template <typename Kv>
constexpr bool kIsQuantised = sizeof(Kv) == 1;

// A tile of keys or values in shared memory: rows of kRowBytes in 16-byte chunks, swizzled so that eight rows'
// addresses for ldmatrix fall into different banks. Tiles start at multiples of kTileAlignment.
template <int kRowBytes>
struct RowTile {
    static constexpr int kChunks = kRowBytes / 16;

    static __device__ __forceinline__ uint32 offset(int row, int chunk) {
        const int turn = kRowBytes >= 128 ? row & 7 : (row >> 1) & 3;
        return row * kRowBytes + ((chunk ^ turn) << 4);
    }
};

// acc[16×8] += a[16×16] · b[16×8], f16 in, float32 out; lanes hold the same places as with mma_bf16.
__device__ __forceinline__ void mma_f16(float (&acc)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded into one register, `low` in the lower half.
__device__ __forceinline__ uint32 pack_f16(float low, float high) {
    __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32*>(&both);
}

// A lane's part of a query head into its row of the query tile: bf16 in order; or, for e4m3 pages, f16 with
// each 16 columns in the order 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15. So the four neighbouring bytes that
// ldmatrix gives a lane of a key are the four columns that the lane contributes to a product of 16.
template <typename Kv, int kHeadDim, int kEach>
__device__ __forceinline__ void store_query(unsigned char* queries, int row, const float (&x)[kEach],
                                            int lane) {
#pragma unroll
    for (int j = 0; j < kEach; j += 2) {
        const int column = lane * kEach + j;
        const int within = column % 16;
        const int chunk = kIsQuantised<Kv> ? column / 16 * 2 + within % 4 / 2 : column / 8;
        const int byte = kIsQuantised<Kv> ? within / 4 * 4 : column % 8 * 2;
        *reinterpret_cast<uint32*>(queries + TileLayout<kHeadDim>::offset(row, chunk) + byte) =
            kIsQuantised<Kv> ? pack_f16(x[j], x[j + 1]) : pack_bf16(x[j], x[j + 1]);
    }
}

// As attend_tile, for a stage of e4m3. scales: of the page's keys and values. acc.out is kept in units of
// `value_unit`; its columns of each 16 are, for lane l, 4(l%4) and +2 in the even, +1 and +3 in the odd tile.
template <int kHeadDim, int kKeys>
__device__ __forceinline__ void attend_quantised(Accumulator<kHeadDim>& acc, float& value_unit, float2 scales,
                                                 uint32 lane_queries, uint32 stage, int key0, int key_begin,
                                                 int key_end, float scale, int lane) {
    using Tile = RowTile<kHeadDim>;
    float scores[kKeys / 8][4] = {};
    float others[kKeys / 8][4] = {};
    const uint32 lane_keys = stage + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < kHeadDim / 32; ++step) {
        uint32 heads[2][4];
        load_matrix_x4(heads[0], step_address<kHeadDim>(lane_queries, 0, 2 * step));
        load_matrix_x4(heads[1], step_address<kHeadDim>(lane_queries, 0, 2 * step + 1));
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            uint32 keys[4];
            load_matrix_x4(keys, (lane_keys ^ (step * 32)) + n * 16 * kHeadDim);
            mma_f16(scores[2 * n], heads[0], halves_of(keys[0], false), halves_of(keys[0], true));
            mma_f16(others[2 * n], heads[1], halves_of(keys[1], false), halves_of(keys[1], true));
            mma_f16(scores[2 * n + 1], heads[0], halves_of(keys[2], false), halves_of(keys[2], true));
            mma_f16(others[2 * n + 1], heads[1], halves_of(keys[3], false), halves_of(keys[3], true));
        }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int key = key0 + n * 8 + (lane % 4) * 2 + (j & 1);
            const bool seen = key >= key_begin && key < key_end;
            scores[n][j] = seen ? (scores[n][j] + others[n][j]) * scales.x : -INFINITY;
        }
    }
    if (scales.y != value_unit) {
        const float factor = value_unit * inverse_of(scales.y);
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc.out[n][j] *= factor;
        value_unit = scales.y;
    }
    weigh(scores, acc.out, acc.rows, scale * kLog2E);
    const uint32 lane_values = stage + kKeys * kHeadDim + Tile::offset(lane % 16, lane / 16);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
        uint32 weights[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            weights[j] =
                pack_f16(scores[2 * n + j / 2][(j & 1) * 2], scores[2 * n + j / 2][(j & 1) * 2 + 1]);
#pragma unroll
        for (int step = 0; step < kHeadDim / 32; ++step) {
            uint32 columns[4];  // of a key pair: bytes of the first key in the lower half, of the second above
            load_matrix_x4_transposed(columns, (lane_values ^ (step * 32)) + n * 16 * kHeadDim);
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                const uint32 first = __byte_perm(columns[2 * chunk], 0, 0x3120);
                const uint32 second = __byte_perm(columns[2 * chunk + 1], 0, 0x3120);
                const int even = 4 * step + 2 * chunk;
                mma_f16(acc.out[even], weights, halves_of(first, false), halves_of(second, false));
                mma_f16(acc.out[even + 1], weights, halves_of(first, true), halves_of(second, true));
            }
        }
    }
}

// A warp's result: rows of kHeadDim + kMergePad floats and their totals (maximum in log2, sum).
template <typename Kv, int kHeadDim>
__device__ __forceinline__ void put_part(const Accumulator<kHeadDim>& acc, float value_unit, float* rows,
                                         float2* totals, int group, float unit, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = acc.rows[half].total();
        const int row = lane / 4 + half * 8;
        if (row >= group) continue;
        if (lane % 4 == 0) totals[row] = make_float2(acc.rows[half].maximum * unit, sum);
        float* target = rows + row * (kHeadDim + kMergePad);
        if constexpr (kIsQuantised<Kv>) {
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; n += 2)
                *reinterpret_cast<float4*>(target + n * 8 + lane % 4 * 4) =
                    make_float4(acc.out[n][half * 2] * value_unit, acc.out[n + 1][half * 2] * value_unit,
                                acc.out[n][half * 2 + 1] * value_unit, acc.out[n + 1][half * 2 + 1] * value_unit);
        } else {
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                *reinterpret_cast<float2*>(target + n * 8 + lane % 4 * 2) =
                    make_float2(acc.out[n][half * 2], acc.out[n][half * 2 + 1]);
        }
    }
}

}  // namespace slipstream
