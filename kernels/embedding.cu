// Token embeddings gathered into the residual stream.
#include "ptx.cuh"
#include "types.cuh"

using namespace slipstream;

// out[r] = table[token(r)] · scale, where token(r) = tokens[r] or, with row_slot, slot_token[row_slot[r]]: the
// token that a decode row's slot sampled last. A row without a slot (−1) or with an id outside the table
// becomes zeros, so that padding stays finite. table: bf16 [vocab, hidden]; out: bf16 [rows, hidden].
// One block a row; hidden % 8 = 0.
__global__ void __launch_bounds__(256)
    embed(const bf16* __restrict__ table, const int32* __restrict__ tokens, const int32* __restrict__ row_slot,
          const int32* __restrict__ slot_token, bf16* __restrict__ out, int32 vocab, int32 hidden,
          float scale) {
    constexpr int kVector = 8;
    wait_for_previous_kernels();
    allow_next_kernel();
    const int64 row = blockIdx.x;
    int32 token;
    if (row_slot) {
        const int32 slot = row_slot[row];
        token = slot < 0 ? -1 : slot_token[slot];
    } else {
        token = tokens[row];
    }
    const bool known = token >= 0 && token < vocab;
    for (int column = threadIdx.x * kVector; column < hidden; column += blockDim.x * kVector) {
        float values[kVector] = {};
        if (known) load_floats(table + int64(token) * hidden + column, values);
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[j] *= scale;
        store_floats(out + row * hidden + column, values);
    }
}
