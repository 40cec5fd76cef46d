// What the sampling kernels hand from one to the next. Knows no kernel.
#pragma once

#include "reduce.cuh"
#include "sampling.cuh"
#include "slots.cuh"

namespace slipstream {

constexpr int kMostChunks = 128;
constexpr int kBins = 2048;  // of a row's histogram by distance from its peak …
constexpr float kBinsPerNat =
    64.0f;  // … so it reaches 32 nats; the last bin takes the rest, which weighs nothing

struct ChunkBest {
    uint64 best;  // ranked() of the chunk's most likely token after processing
    int32 bad;    // a raw logit is NaN or +inf
    int32 unused;
};

// Which bins the cuts of top-k and top-p lie in.
struct RowCut {
    int32 bin_k;     // holds the k-th entry; −1: top-k cuts nothing that weighs
    int32 before_k;  // entries in earlier bins
    int32 bin_low;   // the cut of top-p lies in bin_low … bin_high; kBins: top-p is off
    int32 bin_high;

    __device__ __forceinline__ bool holds(int bin) const {
        return bin == bin_k || (bin >= bin_low && bin <= bin_high);
    }
    // Entries in earlier bins survive both.
    __device__ __forceinline__ int first_doubtful() const {
        return bin_low < kBins ? bin_low : (bin_k >= 0 ? bin_k : kBins);
    }
};

// Weights of the entries of one chunk that no cut can reach.
struct ChunkMass {
    uint64 all;        // of all entries of the chunk
    uint64 certain;    // of entries before RowCut::first_doubtful
    uint64 surviving;  // of those, the ones that min-p keeps
    uint64 before_k;   // of entries before RowCut::bin_k
};

struct SampleScratch {
    float* processed;           // [rows, stride] written only for rows that need processing
    ChunkBest* best;            // [rows, chunks]
    ChunkMass* mass;            // [rows, chunks]
    int32* bin_counts;          // [rows, kBins]
    uint64* bin_masses;         // [rows, kBins] in units of 2^−19 of the bin's largest weight
    RowCut* cut;                // [rows]
    int32* n_collected;         // [rows, chunks]
    unsigned short* collected;  // [rows, chunks, kChunk] offsets in the chunk
};

enum RowStatus { kNoToken = 0, kToken = 1, kStopped = 2, kFault = 3 };

__device__ __forceinline__ int32 slot_of(const SlotArrays& slots, const int32* row_slot, int row,
                                         int32 first_token) {
    const int32 slot = row_slot[row];
    return slot >= 0 && (first_token || slots.active[slot]) ? slot : -1;
}

__device__ __forceinline__ bool bans_stops(const SlotSampling& how, int32 output_count) {
    return how.n_stop > 0 && output_count < how.min_tokens;
}

__device__ __forceinline__ bool needs_processing(const SlotSampling& how, int32 output_count) {
    return how.penalised || how.n_bias > 0 || bans_stops(how, output_count);
}

// Whether top-k or top-p is on.
__device__ __forceinline__ bool has_cut(const SlotSampling& how, int32 vocab) {
    return (how.top_k > 0 && how.top_k < vocab) || how.top_p < 1.0;
}

__device__ __forceinline__ bool is_filtered(const SlotSampling& how, int32 vocab) {
    return has_cut(how, vocab) || how.min_p > 0.0f;
}

__device__ __forceinline__ float penalised(float z, uint32 count, const SlotSampling& how) {
    if (count == 0) return z;
    if (how.repetition_penalty != 1.0f)
        z = z > 0.0f ? __fdiv_rn(z, how.repetition_penalty) : __fmul_rn(z, how.repetition_penalty);
    const uint32 generated = count & ~kInPrompt;
    z = __fsub_rn(z, __fmul_rn(float(generated), how.frequency_penalty));
    return generated ? __fsub_rn(z, how.presence_penalty) : z;
}

// The bin of a logit.
__device__ __forceinline__ int bin_of(float z, const Temper& temper) {
    const float distance = (temper.peak - z) * temper.bins_per_unit;
    return distance < kBins - 1 ? int(distance) : kBins - 1;
}

// The row's peak from its chunks; all threads get it. kMostChunks ≤ blockDim.x.
__device__ __forceinline__ uint64 row_best(const ChunkBest* chunks, int n_chunks, int32& bad, uint64* scratch) {
    const bool mine = threadIdx.x < n_chunks;
    const uint64 best = block_reduce(mine ? chunks[threadIdx.x].best : uint64(0), Max{}, uint64(0), scratch);
    bad = __syncthreads_or(mine && chunks[threadIdx.x].bad);
    return best;
}

// Four consecutive logits from `first`, −inf past the vocabulary.
template <typename T>
__device__ __forceinline__ void load_four(const T* row, int first, int vocab, float (&out)[4]) {
    if (first < vocab) load_floats(row + first, out);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (first + j >= vocab) out[j] = -INFINITY;
}

template <typename T>
__device__ __forceinline__ void load_processed(const T* logits, const float* processed, bool changed, int first,
                                               int vocab, float (&out)[4]) {
    if (changed)
        load_four(processed, first, vocab, out);
    else
        load_four(logits, first, vocab, out);
}

// The least `kept` mass that top-p asks for.
__device__ __forceinline__ uint64 nucleus_goal(double top_p, uint64 mass) {
    const double goal = ceil(top_p * double(mass));
    return goal < 1.0 ? 1 : (goal >= double(mass) ? mass : uint64(goal));
}

}  // namespace slipstream
