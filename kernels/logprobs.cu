// Log-probabilities of raw logits: of a given token, its rank, and of the most likely alternatives.
//
// Runs only where somebody asked. Two launches: every chunk of 4,096 entries, then every row.
#include "ptx.cuh"
#include "reduce.cuh"
#include "sampling.cuh"
#include "slots.cuh"

using namespace slipstream;

namespace {

constexpr int kThreads = 256;
constexpr int kMostAlternatives = 20;

struct ChunkLogprobs {
    uint64 top[kMostAlternatives];  // ranked(), best first; 0 past the chunk's end
    double sum;                     // of exp(logit − peak of the chunk)
    int32 before;                   // entries that rank before the target token
    int32 unused;
};

// How many alternatives a row wants; −1: nothing at all.
__device__ __forceinline__ int32 wanted(const int32* alternatives, const int32* row_slot,
                                        const SlotArrays& slots, int row, int32 target) {
    if (target < 0) return -1;
    if (alternatives) return min(alternatives[row], kMostAlternatives);
    const int32 slot = row_slot[row];
    return slot < 0 ? -1 : min(slots.sampling[slot].logprobs, kMostAlternatives);
}

}  // namespace

// logits: Logit [rows, stride]. targets: int32 [rows], −1: skip the row. alternatives: int32 [rows] (−1: skip),
// or null: what the row's slot asks for. parts: ChunkLogprobs [rows, chunks]. Grid (chunks, rows), 256 threads.
template <typename Logit>
__global__ void __launch_bounds__(kThreads, 2)
    logprob_chunks(const Logit* __restrict__ logits, const int32* __restrict__ targets,
                   const int32* __restrict__ alternatives, const int32* __restrict__ row_slot,
                   const SlotArrays slots, ChunkLogprobs* __restrict__ parts, int32 stride) {
    constexpr int kEach = kChunk / kThreads;
    __shared__ uint64 reduction[2][32];
    __shared__ double sums[32];
    wait_for_previous_kernels();
    allow_next_kernel();
    const int row = blockIdx.y;
    const int32 target = targets[row];
    const int32 count = wanted(alternatives, row_slot, slots, row, target);
    if (count < 0) return;
    const Logit* source = logits + int64(row) * stride;
    const uint64 own = ranked(to_float(source[target]), target);
    uint64 keys[kEach];
    uint64 best = 0;
    int32 before = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int32 id = blockIdx.x * kChunk + i * kThreads + threadIdx.x;
        keys[i] = id < slots.vocab ? ranked(to_float(source[id]), id) : 0;
        best = Max{}(best, keys[i]);
        before += keys[i] > own;
    }
    const uint64 peak_key = block_reduce(best, Max{}, uint64(0), reduction[0]);
    const float peak = ranked_value(peak_key);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (keys[i] && peak > -INFINITY) sum += expf(ranked_value(keys[i]) - peak);
    const double total = block_reduce(double(sum), Sum{}, 0.0, sums);
    const uint64 all_before = block_reduce(uint64(before), Sum{}, uint64(0), reduction[1]);
    ChunkLogprobs* part = parts + int64(row) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) {
        part->top[0] = peak_key;
        part->sum = total;
        part->before = int32(all_before);
    }
    uint64 last = peak_key;
    for (int rank = 1; rank < count; ++rank) {
        best = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (keys[i] < last) best = Max{}(best, keys[i]);
        last = block_reduce(best, Max{}, uint64(0), reduction[(rank + 1) & 1]);
        if (threadIdx.x == 0) part->top[rank] = last;
        if (last == 0) {  // the chunk is exhausted
            for (int rest = rank + 1 + threadIdx.x; rest < count; rest += kThreads) part->top[rest] = 0;
            break;
        }
    }
}

// After logprob_chunks. logprobs: float32 [rows] of the target; ranks: int32 [rows], 1 the most likely;
// top_ids, top_logprobs: [rows, 20], −1 and −inf past what was asked for. Rows that ask for nothing get rank 0.
// Grid (rows), 256 threads.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    logprob_rows(const Logit* __restrict__ logits, const int32* __restrict__ targets,
                 const int32* __restrict__ alternatives, const int32* __restrict__ row_slot,
                 const SlotArrays slots, const ChunkLogprobs* __restrict__ parts, float* __restrict__ logprobs,
                 int32* __restrict__ ranks, int32* __restrict__ top_ids, float* __restrict__ top_logprobs,
                 int32 stride, int32 n_chunks) {
    __shared__ uint64 reduction[2][32];
    __shared__ double sums[32];
    wait_for_previous_kernels();
    allow_next_kernel();
    const int row = blockIdx.x;
    const int32 target = targets[row];
    const int32 count = wanted(alternatives, row_slot, slots, row, target);
    if (count < 0) {
        if (threadIdx.x == 0) ranks[row] = 0;
        return;
    }
    const bool mine = threadIdx.x < n_chunks;
    const ChunkLogprobs* part = parts + int64(row) * n_chunks + threadIdx.x;
    const uint64 chunk_peak = mine ? part->top[0] : 0;
    const uint64 peak_key = block_reduce(chunk_peak, Max{}, uint64(0), reduction[0]);
    const float peak = ranked_value(peak_key);
    const float own_peak = mine && chunk_peak ? ranked_value(chunk_peak) : -INFINITY;
    const double share = own_peak > -INFINITY ? part->sum * exp(double(own_peak) - double(peak)) : 0.0;
    const double total = block_reduce(share, Sum{}, 0.0, sums);
    const uint64 before = block_reduce(uint64(mine ? part->before : 0), Sum{}, uint64(0), reduction[1]);
    const double normaliser = double(peak) + log(total);
    if (threadIdx.x == 0) {
        logprobs[row] = float(double(to_float(logits[int64(row) * stride + target])) - normaliser);
        ranks[row] = int32(before) + 1;
    }
    // Each thread offers its chunk's best entry that is not taken yet.
    int taken = 0;
    for (int rank = 0; rank < kMostAlternatives; ++rank) {
        uint64 best = 0;
        if (rank < count) {
            const uint64 offer = mine && taken < count ? part->top[taken] : 0;
            best = block_reduce(offer, Max{}, uint64(0), reduction[rank & 1]);
            if (offer && offer == best) taken += 1;
        }
        if (threadIdx.x == 0) {
            const int64 place = int64(row) * kMostAlternatives + rank;
            top_ids[place] = best ? ranked_id(best) : -1;
            top_logprobs[place] = best ? float(double(ranked_value(best)) - normaliser) : -INFINITY;
        }
    }
}
