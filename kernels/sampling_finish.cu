// The choosing half of sampling: the exact cut, the draw, and the slot's step forward. One block a row.
//
// The cut is found by bisection over the bits of the logit, among the entries that sample_collect found in the
// bins where it lies; then the draw picks a chunk by weight, and an entry of that chunk. The definition is that
// of engine/reference: vocabulary order, float32 weights, the first running sum that exceeds u · total.
#include "ptx.cuh"
#include "reduce.cuh"
#include "sampling_cut.cuh"

using namespace slipstream;

namespace {

__device__ __forceinline__ uint64 sum_over_chunks(uint64 own, uint64* scratch) {
    __syncthreads();
    return block_reduce(own, Sum{}, uint64(0), scratch);
}

// Applies top-k, then top-p to what is left.
template <typename List>
__device__ __forceinline__ Cut find_cut(const List& entries, const Weights& weigh, const SlotSampling& how,
                                        const RowCut& bins, const ChunkMass& own, FinishShared& shared) {
    uint64* scratch = shared.reduction;
    Cut by_count = kNoCut;
    uint64 kept = 0;
    if (bins.bin_k >= 0) {
        const auto in_bin = [&](float z) { return weigh.bin(z) == bins.bin_k; };
        by_count = cut_reaching<false>(entries, weigh, how.top_k - bins.before_k, in_bin, shared);
        const auto above = [&](float z) { return key_of(z) > by_count.key && in_bin(z); };
        const Measured<true, List, decltype(above)> measured_above(entries, weigh, above, scratch);
        kept = sum_over_chunks(own.before_k, scratch) + measured_above.from(0) +
               by_count.ties * weigh.fixed(key_value(by_count.key));
    } else {
        kept = sum_over_chunks(own.all, scratch);
    }
    if (bins.bin_low == kBins) return by_count;
    const uint64 goal = nucleus_goal(how.top_p, kept);
    const uint64 certain = sum_over_chunks(own.certain, scratch);
    const auto in_bins = [&](float z) {
        const int bin = weigh.bin(z);
        return bin >= bins.bin_low && bin <= bins.bin_high && key_of(z) >= by_count.key;
    };
    Cut by_mass = cut_reaching<true>(entries, weigh, goal > certain ? goal - certain : 1, in_bins, shared);
    if (by_mass.key < by_count.key) return by_count;
    if (by_mass.key == by_count.key) by_mass.ties = min(by_mass.ties, by_count.ties);
    return by_mass;
}

// Each chunk's surviving weight into shared.mass, and the ties before each chunk into shared.ties.
template <typename Logit>
__device__ __forceinline__ void weigh_chunks(const Entries<Logit>& entries, const Weights& weigh,
                                             const Cut& cut, const ChunkMass* masses, FinishShared& shared) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int chunk = warp; chunk < entries.n_chunks; chunk += kFinishWarps) {
        int32 ties = 0;
        for (int j = lane; j < shared.sizes[chunk]; j += 32)
            ties += key_of(entries.z(shared.starts[chunk] + j)) == cut.key;
        ties = warp_reduce(ties, Sum{});
        if (lane == 0) shared.ties[chunk] = ties;
    }
    __syncthreads();
    int32 all;
    const int32 before = block_scan<kFinishThreads>(
        threadIdx.x < entries.n_chunks ? shared.ties[threadIdx.x] : 0, all, shared.counts);
    if (threadIdx.x < entries.n_chunks) shared.ties[threadIdx.x] = before;
    __syncthreads();
    for (int chunk = warp; chunk < entries.n_chunks; chunk += kFinishWarps) {
        uint64 mass = 0;
        uint64 rank = shared.ties[chunk];
        const int count = shared.sizes[chunk];
        for (int start = 0; start < count; start += 32) {
            const int j = start + lane;
            const float z = j < count ? entries.z(shared.starts[chunk] + j) : -INFINITY;
            const bool ties = j < count && key_of(z) == cut.key;
            const uint32 peers = __ballot_sync(0xffffffffu, ties);
            const bool kept = ties ? rank + __popc(peers & ((1u << lane) - 1)) < cut.ties : key_of(z) > cut.key;
            if (j < count && kept) mass += weigh.surviving(z);
            rank += __popc(peers);
        }
        mass = warp_reduce(mass, Sum{});
        if (lane == 0) shared.mass[chunk] = mass + masses[chunk].surviving;
    }
    __syncthreads();
}

// Picks a chunk by shared.mass, then its first entry at which the running sum exceeds the target.
template <typename Logit>
__device__ __forceinline__ int32 draw(const Entries<Logit>& entries, const Weights& weigh, const Cut& cut,
                                      uint32 word, int32 vocab, FinishShared& shared) {
    const uint64 own = threadIdx.x < entries.n_chunks ? shared.mass[threadIdx.x] : 0;
    if (threadIdx.x == 0) shared.token = -1;
    uint64 total;
    const uint64 before = block_scan<kFinishThreads>(own, total, shared.reduction);
    const uint64 target = draw_target(total, word);
    if (own && before <= target && before + own > target) {
        shared.chunk = threadIdx.x;
        shared.chunk_before = before;
    }
    __syncthreads();
    const int first = shared.chunk * kChunk + threadIdx.x * kEach;
    float z[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
        float four[4];
        load_processed(entries.logits, entries.processed, entries.changed, first + i, vocab, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) z[i + j] = four[j];
    }
    uint64 rank = 0;
    if (cut.ties != ~uint64(0)) {
        int32 ties = 0, all;
#pragma unroll
        for (int i = 0; i < kEach; ++i) ties += key_of(z[i]) == cut.key;
        rank = shared.ties[shared.chunk] + block_scan<kFinishThreads>(ties, all, shared.counts);
    }
    uint64 weights[kEach];
    uint64 mass = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const uint32 key = key_of(z[i]);
        const bool ties = key == cut.key;
        weights[i] = key > cut.key || (ties && rank < cut.ties) ? weigh.surviving(z[i]) : 0;
        rank += ties;
        mass += weights[i];
    }
    uint64 all;
    uint64 running = shared.chunk_before + block_scan<kFinishThreads>(mass, all, shared.reduction);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        if (running <= target && running + weights[i] > target) shared.token = first + i;
        running += weights[i];
    }
    __syncthreads();
    return shared.token;
}

// Chooses from a row with temperature above 0.
template <typename Logit>
__device__ __forceinline__ int32 choose(Entries<Logit>& entries, const Weights& weigh, const SlotSampling& how,
                                        const SampleScratch& scratch, int row, uint32 word, int32 vocab,
                                        FinishShared& shared) {
    const ChunkMass* masses = scratch.mass + int64(row) * entries.n_chunks;
    const int32* n_collected = scratch.n_collected + int64(row) * entries.n_chunks;
    const bool mine = threadIdx.x < entries.n_chunks;
    Cut cut = kNoCut;
    if (!is_filtered(how, vocab)) {
        if (mine) shared.mass[threadIdx.x] = masses[threadIdx.x].all;
        __syncthreads();
        return draw(entries, weigh, cut, word, vocab, shared);
    }
    const int32 size = mine ? n_collected[threadIdx.x] : 0;
    const int32 start = block_scan<kFinishThreads>(size, entries.count, shared.counts);
    if (mine) {
        shared.starts[threadIdx.x] = start;
        shared.sizes[threadIdx.x] = size;
    }
    __syncthreads();
    for (int chunk = threadIdx.x / 32; chunk < entries.n_chunks; chunk += kFinishWarps)
        for (int j = threadIdx.x % 32; j < shared.sizes[chunk] && shared.starts[chunk] + j < kCached; j += 32)
            shared.cached_z[shared.starts[chunk] + j] = entries.fetch(chunk, j);
    __syncthreads();
    const ChunkMass own = mine ? masses[threadIdx.x] : ChunkMass{};
    cut = find_cut(entries, weigh, how, scratch.cut[row], own, shared);
    weigh_chunks(entries, weigh, cut, masses, shared);
    return draw(entries, weigh, cut, word, vocab, shared);
}

}  // namespace

// After sample_collect, or after sample_scan where all rows are greedy. tokens: int32 [rows], −1 where none was
// sampled; statuses: int32 [rows] RowStatus. A sampled row's slot moves on: last_token, output_count, position
// + 1, active = not stopped, count table. A row whose logits leave nothing to choose from is a fault, and its
// slot becomes inactive. Grid (rows), 512 threads.
template <typename Logit>
__global__ void __launch_bounds__(kFinishThreads)
    sample_finish(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                  const SampleScratch scratch, int32* __restrict__ tokens, int32* __restrict__ statuses,
                  int32 stride, int32 n_chunks, int32 first_token) {
    __shared__ FinishShared shared;
    wait_for_previous_kernels();
    allow_next_kernel();
    const int row = blockIdx.x;
    const int32 slot = slot_of(slots, row_slot, row, first_token);
    if (slot < 0) {
        if (threadIdx.x == 0) {
            tokens[row] = -1;
            statuses[row] = kNoToken;
        }
        return;
    }
    const SlotSampling how = slots.sampling[slot];
    const int32 output_count = slots.output_count[slot];
    const int64 first_chunk = int64(row) * n_chunks;
    int32 bad;
    const uint64 best = row_best(scratch.best + first_chunk, n_chunks, bad, shared.reduction);
    const float peak = ranked_value(best);
    int32 token = bad || peak == -INFINITY ? -1 : ranked_id(best);

    if (token >= 0 && how.temperature != 0.0f) {
        const Weights weigh(peak, how);
        Entries<Logit> entries{logits + int64(row) * stride,
                               scratch.processed + int64(row) * stride,
                               scratch.collected + first_chunk * kChunk,
                               shared.starts,
                               shared.cached_z,
                               needs_processing(how, output_count),
                               n_chunks,
                               0};
        token = choose(entries, weigh, how, scratch, row, philox_word(how.seed, uint64(output_count)),
                       slots.vocab, shared);
    }
    bool stops = false;
    for (int i = threadIdx.x; i < how.n_stop; i += kFinishThreads)
        stops |= slots.stop_ids[int64(slot) * slots.max_stop + i] == token;
    stops = __syncthreads_or(stops);
    if (threadIdx.x != 0) return;
    tokens[row] = token;
    if (token < 0) {
        statuses[row] = kFault;
        slots.active[slot] = 0;
        return;
    }
    statuses[row] = stops ? kStopped : kToken;
    slots.active[slot] = !stops;
    slots.last_token[slot] = token;
    slots.output_count[slot] = output_count + 1;
    slots.position[slot] += 1;
    if (how.penalised) slots.counts[int64(slot) * slots.vocab + token] += 1;
}
