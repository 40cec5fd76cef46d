// q4_0 weights in tiles: where a lane's part is, and how four bits become bf16. Knows no kernel.
//
// A tile is 16 rows × 64 of k: 512 bytes of quants, 16 for each lane, and 32 f16 scales. Of lane l's four words
// the first is row l/4, block 0 (32 of k), the second row l/4 + 8, block 0, then both of block 1; a word holds
// elements 8·(l%4) … +7 of the block, from the low nibble up 0, 2, 4, 6, 1, 3, 5, 7.
#pragma once

#include <cuda_fp16.h>

#include "ptx.cuh"
#include "types.cuh"

namespace slipstream {

constexpr int kQ4Block = 32;
constexpr int kQ4TileRows = 16;
constexpr int kQ4TileColumns = 64;
constexpr int kQ4TileBytes = 512;
constexpr int kQ4TileScales = 32;

// A lane's part of a tile.
struct Q4Piece {
    uint4 words;
    uint2 scales;  // f16: x row l/4 and l/4 + 8 of block 0, y of block 1
};

// A weight's bytes, from this lane's part of its first tile on.
struct Q4Source {
    const unsigned char* quants;
    const __half* scales;

    __device__ __forceinline__ Q4Source(const unsigned char* quants, const __half* scales, int lane)
        : quants(quants + lane * 16), scales(scales + lane / 4 * 4) {}

    // From that tile on.
    __device__ __forceinline__ void advance(uint32 tiles) {
        quants += uint64(tiles) * uint32(kQ4TileBytes);
        scales += uint64(tiles) * uint32(kQ4TileScales);
    }
};

// The lane's part of a tile; left as it is unless `wanted`. Nobody reads the bytes again.
__device__ __forceinline__ void load_q4_piece(Q4Piece& piece, const Q4Source& source, uint32 tile, bool wanted) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %8, 0;\n"
        "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%6];\n"
        "@wanted ld.global.nc.L1::no_allocate.v2.u32 {%4,%5}, [%7];\n}"
        : "+r"(piece.words.x), "+r"(piece.words.y), "+r"(piece.words.z), "+r"(piece.words.w), "+r"(piece.scales.x),
          "+r"(piece.scales.y)
        : "l"(source.quants + uint64(tile) * uint32(kQ4TileBytes)),
          "l"(source.scales + uint64(tile) * uint32(kQ4TileScales)), "r"(int(wanted)));
}

// Row l/4's scale (`high` 0) or row l/4 + 8's (1) of one block's pair.
__device__ __forceinline__ float q4_scale(uint32 pair, int high) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? pair >> 16 : pair & 0xffff)));
}

// Where the pairs of a word are. Takes any number ≥ 0 that the compiler does not know: of a constant it would make
// an immediate, and move that into a register for each use beside the other one.
__device__ __forceinline__ uint32 q4_pair_mask(int32 not_negative) {
    return 0x000f000fu | uint32(not_negative >> 31);
}

// Elements 2·i and 2·i + 1 of a word, less 8: exact in bf16. 0x4300 | q is 128 + q.
__device__ __forceinline__ __nv_bfloat162 q4_pair(uint32 word, int i, uint32 mask) {
    const uint32 biased = ((word >> (4 * i)) & mask) | 0x43004300u;
    return __hsub2(reinterpret_cast<const __nv_bfloat162&>(biased), __float2bfloat162_rn(136.0f));
}

}  // namespace slipstream
