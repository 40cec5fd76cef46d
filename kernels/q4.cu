// q4_0 weights in tiles (q4.cuh): made from bf16 rows or from a GGUF file's blocks, and turned back into bf16.
//
// A warp has a tile, or several beside each other. All three are bound by bytes.
#include "q4.cuh"

using namespace slipstream;

namespace {

constexpr int kWarps = 8;
constexpr int kFileBlockBytes = 18;  // f16 d, then byte i: element i below element i + 16

// Position of element i of 8 among a word's nibbles.
__device__ constexpr int nibble_of(int i) {
    return i / 2 + i % 2 * 4;
}

// The four lanes of a block of 32: the value of largest magnitude, the first among equals.
__device__ __forceinline__ float largest_of_block(const float (&values)[8], int lane) {
    float best = values[0];
#pragma unroll
    for (int i = 1; i < 8; ++i)
        if (fabsf(values[i]) > fabsf(best)) best = values[i];
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best, offset);
        const bool earlier = (lane & offset) != 0;
        if (fabsf(other) > fabsf(best) || (earlier && fabsf(other) == fabsf(best))) best = other;
    }
    return best;
}

// Rounded half up and cut at 0 and 15; each operation rounds by itself, as the definition's do.
__device__ __forceinline__ uint32 quantised(float value, float inverse) {
    const float step = truncf(__fadd_rn(__fmul_rn(value, inverse), 8.5f));
    return isfinite(step) ? uint32(fminf(fmaxf(step, 0.0f), 15.0f)) : 0;
}

struct Q4Word {
    uint32 word;
    unsigned short scale;
};

__device__ __forceinline__ Q4Word quantise_word(const bf16* source, bool valid, int lane) {
    float values[8] = {};
    if (valid) load_floats(source, values);
    const float scale = largest_of_block(values, lane) * -0.125f;
    const float inverse = scale == 0.0f ? 0.0f : __frcp_rn(scale);
    Q4Word result = {0, __half_as_ushort(__float2half_rn(scale))};
#pragma unroll
    for (int i = 0; i < 8; ++i) result.word |= quantised(values[i], inverse) << (4 * nibble_of(i));
    return valid ? result : Q4Word{0x88888888u, 0};
}

__device__ __forceinline__ Q4Word repack_word(const unsigned char* block, bool valid, int lane) {
    if (!valid) return {0x88888888u, 0};
    const auto* halves = reinterpret_cast<const unsigned short*>(block);
    const int shift = lane % 4 / 2 * 4;  // elements 16 … 31 are the high nibbles
    Q4Word result = {0, halves[0]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32 bytes = halves[1 + lane % 2 * 4 + i];
        result.word |= ((bytes >> shift) & 0xf) << (4 * nibble_of(2 * i));
        result.word |= ((bytes >> (8 + shift)) & 0xf) << (4 * nibble_of(2 * i + 1));
    }
    return result;
}

// word_at(row, block) for each of the lane's four words, stored.
template <typename WordAt>
__device__ __forceinline__ void make_tile(unsigned char* quants, __half* scales, int32 k, WordAt word_at) {
    const int tile_columns = (k + kQ4TileColumns - 1) / kQ4TileColumns;
    const int column = blockIdx.x * kWarps + threadIdx.x / 32;
    if (column >= tile_columns) return;
    const int lane = threadIdx.x % 32;
    const int64 tile = int64(blockIdx.y) * tile_columns + column;
    Q4Word words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int block = column * 2 + i / 2;
        words[i] = word_at(int64(blockIdx.y) * kQ4TileRows + lane / 4 + i % 2 * 8, block,
                           block * kQ4Block < k, lane);
    }
    *reinterpret_cast<uint4*>(quants + tile * kQ4TileBytes + lane * 16) =
        make_uint4(words[0].word, words[1].word, words[2].word, words[3].word);
    if (lane % 4 == 0)
        *reinterpret_cast<uint2*>(scales + tile * kQ4TileScales + lane) =
            make_uint2(words[0].scale | uint32(words[1].scale) << 16,
                       words[2].scale | uint32(words[3].scale) << 16);
}

}  // namespace

// values: bf16 [n, k], finite. quants, scales: tiles. n = 16 · gridDim.y, k % 32 = 0. Grid (⌈⌈k / 64⌉ / 8⌉, n / 16),
// 256 threads.
__global__ void __launch_bounds__(kWarps * 32)
    q4_quantise(const bf16* __restrict__ values, unsigned char* __restrict__ quants, __half* __restrict__ scales,
                int32 k) {
    wait_for_previous_kernels();
    allow_next_kernel();
    make_tile(quants, scales, k, [&](int64 row, int block, bool valid, int lane) {
        return quantise_word(values + row * k + block * kQ4Block + lane % 4 * 8, valid, lane);
    });
}

// raw: rows of k / 32 blocks of 18 bytes, aligned to 2. Otherwise as q4_quantise.
__global__ void __launch_bounds__(kWarps * 32)
    q4_repack(const unsigned char* __restrict__ raw, unsigned char* __restrict__ quants,
              __half* __restrict__ scales, int32 k) {
    wait_for_previous_kernels();
    allow_next_kernel();
    make_tile(quants, scales, k, [&](int64 row, int block, bool valid, int lane) {
        return repack_word(raw + (row * (k / kQ4Block) + block) * kFileBlockBytes, valid, lane);
    });
}

// out: bf16 [n, k]: d · (q − 8), rounded once. Grid (⌈⌈k / 64⌉ / (8 · kPerWarp)⌉, n / 16), 256 threads.
template <int kPerWarp>
__global__ void __launch_bounds__(kWarps * 32)
    q4_dequantise(const unsigned char* __restrict__ quants, const __half* __restrict__ scales,
                  bf16* __restrict__ out, int32 k) {
    const int lane = threadIdx.x % 32;
    const int tile_columns = (k + kQ4TileColumns - 1) / kQ4TileColumns;
    const int first = (blockIdx.x * kWarps + threadIdx.x / 32) * kPerWarp;
    const int64 tile_row = blockIdx.y;
    const Q4Source source(quants, scales, lane);
    Q4Piece pieces[kPerWarp] = {};
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i)
        load_q4_piece(pieces[i], source, blockIdx.y * tile_columns + first + i, first + i < tile_columns);
    wait_for_previous_kernels();
    allow_next_kernel();
    const uint32 mask = q4_pair_mask(k);
#pragma unroll
    for (int i = 0; i < kPerWarp; ++i) {
        if (first + i >= tile_columns) break;
        const uint32 words[4] = {pieces[i].words.x, pieces[i].words.y, pieces[i].words.z, pieces[i].words.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = (first + i) * kQ4TileColumns + j / 2 * kQ4Block + lane % 4 * 8;
            if (column >= k) break;
            const float scale = q4_scale(j / 2 ? pieces[i].scales.y : pieces[i].scales.x, j % 2);
            float values[8];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 both = __bfloat1622float2(q4_pair(words[j], pair, mask));
                values[2 * pair] = both.x * scale;
                values[2 * pair + 1] = both.y * scale;
            }
            store_floats(out + (tile_row * kQ4TileRows + lane / 4 + j % 2 * 8) * k + column, values);
        }
    }
}
