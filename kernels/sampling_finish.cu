// The choosing half of sampling: the exact cut, the draw, and the slot's step forward. One block a row.
//
// The cut is found by bisection over the bits of the logit, among the entries that sample_collect found in the
// bins where it lies; then the draw picks a chunk by weight, and an entry of that chunk. The definition is that
// of engine/reference: vocabulary order, float32 weights, the first running sum that exceeds u · total.
#include "ptx.cuh"
#include "reduce.cuh"
#include "sampling_rows.cuh"

using namespace slipstream;

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kChunk / kThreads;  // consecutive entries of a chunk that a thread handles
constexpr int kRanked = 256;              // up to so many, comparing all with all beats bisection
constexpr int kCached = 2048;             // collected entries kept in shared memory

// Which entries survive: those above `key`, and the first `ties` of those equal to it, in vocabulary order.
struct Cut {
    uint32 key;
    uint64 ties;
};

constexpr Cut kNoCut{0, ~uint64(0)};

struct FinishShared {
    uint64 reduction[32];
    int32 counts[32];
    int32 starts[kMostChunks];  // collected entries before each chunk …
    int32 sizes[kMostChunks];   // … and in it
    int32 ties[kMostChunks];    // equal to the cut: in the chunk, then before it
    uint64 mass[kMostChunks];   // surviving
    float cached_z[kCached];
    uint32 rank_keys[kRanked];
    uint64 rank_measures[kRanked];
    Cut ranked_cut;
    int32 chunk;
    uint64 chunk_before;
    int32 token;
};

// A row's weights, as integers and after min-p.
struct Weights : Temper {
    float min_p;

    __device__ __forceinline__ Weights(float peak, const SlotSampling& how)
        : Temper(peak, how.temperature, kBinsPerNat), min_p(how.min_p) {}

    __device__ __forceinline__ uint64 fixed(float z) const { return fixed_weight(weight(z)); }
    // 0 for what min-p drops.
    __device__ __forceinline__ uint64 surviving(float z) const {
        const float own = weight(z);
        return min_p > 0.0f && own < min_p ? 0 : fixed_weight(own);
    }
    __device__ __forceinline__ int bin(float z) const { return bin_of(z, *this); }
};

__device__ __forceinline__ uint32 key_of(float z) {
    return ordered_key(z + 0.0f);
}

// A row's logits after processing, and its collected entries in vocabulary order.
template <typename Logit>
struct Entries {
    const Logit* logits;
    const float* processed;
    const unsigned short* collected;
    const int32* starts;
    const float* cached_z;
    bool changed;
    int32 n_chunks;
    int32 count;

    __device__ __forceinline__ float value(int32 id) const {
        return changed ? processed[id] : to_float(logits[id]);
    }

    // Entry j of a chunk's collected ones.
    __device__ __forceinline__ float fetch(int chunk, int j) const {
        return value(chunk * kChunk + collected[int64(chunk) * kChunk + j]);
    }

    __device__ __forceinline__ float z(int j) const {
        if (j < kCached) return cached_z[j];
        int low = 0, high = n_chunks - 1;  // the last chunk that starts at or before j
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (starts[middle] <= j)
                low = middle;
            else
                high = middle - 1;
        }
        return fetch(low, j - starts[low]);
    }
};

// The collected entries that `among` accepts, with the weight of each or 1. Those in shared memory are held in
// registers: bisection asks about them some twenty times.
template <bool kMass, typename List, typename Among>
struct Measured {
    static constexpr int kHeld = kCached / kThreads;
    const List& entries;
    const Weights& weigh;
    Among among;
    uint64* scratch;
    uint32 keys[kHeld];  // 0: not accepted
    uint64 measures[kHeld];

    __device__ __forceinline__ Measured(const List& entries, const Weights& weigh, Among among, uint64* scratch)
        : entries(entries), weigh(weigh), among(among), scratch(scratch) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int j = i * kThreads + threadIdx.x;
            const float z = j < entries.count ? entries.z(j) : 0.0f;
            const bool counts = j < entries.count && among(z);
            keys[i] = counts ? key_of(z) : 0;
            measures[i] = counts ? (kMass ? weigh.fixed(z) : 1) : 0;
        }
    }

    // Calls `take` with key and measure of every accepted entry of this thread.
    template <typename Take>
    __device__ __forceinline__ void each(Take take) const {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (keys[i]) take(keys[i], measures[i]);
        for (int j = kCached + threadIdx.x; j < entries.count; j += kThreads) {
            const float z = entries.z(j);
            if (among(z)) take(key_of(z), kMass ? weigh.fixed(z) : 1);
        }
    }

    // Sum over the entries with at least this key. All threads get it, here and below.
    __device__ __forceinline__ uint64 from(uint32 least) const {
        uint64 sum = 0;
        each([&](uint32 key, uint64 measure) { sum += key >= least ? measure : 0; });
        __syncthreads();
        return block_reduce(sum, Sum{}, uint64(0), scratch);
    }

    __device__ __forceinline__ uint32 highest() const {
        uint32 best = 0;
        each([&](uint32 key, uint64) { best = max(best, key); });
        __syncthreads();
        return uint32(block_reduce(uint64(best), Max{}, uint64(0), scratch));
    }

    __device__ __forceinline__ uint32 lowest() const {
        uint32 best = 0;
        each([&](uint32 key, uint64) { best = max(best, ~key); });
        __syncthreads();
        return ~uint32(block_reduce(uint64(best), Max{}, uint64(0), scratch));
    }
};

// cut_reaching for few entries: a thread for each, which compares it with all.
template <bool kMass, typename List, typename Among>
__device__ __forceinline__ Cut cut_by_rank(const List& entries, const Weights& weigh, uint64 goal, Among among,
                                           FinishShared& shared) {
    const int i = threadIdx.x;
    __syncthreads();
    if (i == 0) shared.ranked_cut = kNoCut;
    if (i < entries.count) {
        const float z = entries.z(i);
        const bool counts = among(z);
        shared.rank_keys[i] = counts ? key_of(z) : 0;
        shared.rank_measures[i] = counts ? (kMass ? weigh.fixed(z) : 1) : 0;
    }
    __syncthreads();
    if (i < entries.count) {
        const uint32 key = shared.rank_keys[i];
        uint64 before = 0, ties = 0;
#pragma unroll 4
        for (int j = 0; j < entries.count; ++j) {
            const uint32 other = shared.rank_keys[j];
            const bool equal_before = other == key && j < i;
            before += other > key || equal_before ? shared.rank_measures[j] : 0;
            ties += equal_before;
        }
        if (before < goal && before + shared.rank_measures[i] >= goal) shared.ranked_cut = Cut{key, ties + 1};
    }
    __syncthreads();
    return shared.ranked_cut;
}

// Where the entries, largest first, reach `goal` in number or weight. Keeps all if they do not.
template <bool kMass, typename List, typename Among>
__device__ __forceinline__ Cut cut_reaching(const List& entries, const Weights& weigh, uint64 goal, Among among,
                                            FinishShared& shared) {
    if (entries.count <= kRanked) return cut_by_rank<kMass>(entries, weigh, goal, among, shared);
    const Measured<kMass, List, Among> measured(entries, weigh, among, shared.reduction);
    uint32 high = measured.highest();
    uint32 low = measured.lowest();
    if (low > high) return kNoCut;
    while (low < high) {
        const uint32 middle = low + (high - low + 1) / 2;
        if (measured.from(middle) >= goal)
            low = middle;
        else
            high = middle - 1;
    }
    const uint64 above = measured.from(low + 1);
    if (above >= goal) return Cut{low, 0};
    const uint64 weight = kMass ? weigh.fixed(key_value(low)) : 1;
    return Cut{low, weight ? (goal - above + weight - 1) / weight : ~uint64(0)};
}

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
    for (int chunk = warp; chunk < entries.n_chunks; chunk += kWarps) {
        int32 ties = 0;
        for (int j = lane; j < shared.sizes[chunk]; j += 32)
            ties += key_of(entries.z(shared.starts[chunk] + j)) == cut.key;
        ties = warp_reduce(ties, Sum{});
        if (lane == 0) shared.ties[chunk] = ties;
    }
    __syncthreads();
    int32 all;
    const int32 before =
        block_scan<kThreads>(threadIdx.x < entries.n_chunks ? shared.ties[threadIdx.x] : 0, all, shared.counts);
    if (threadIdx.x < entries.n_chunks) shared.ties[threadIdx.x] = before;
    __syncthreads();
    for (int chunk = warp; chunk < entries.n_chunks; chunk += kWarps) {
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
    const uint64 before = block_scan<kThreads>(own, total, shared.reduction);
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
        rank = shared.ties[shared.chunk] + block_scan<kThreads>(ties, all, shared.counts);
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
    uint64 running = shared.chunk_before + block_scan<kThreads>(mass, all, shared.reduction);
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
    const int32 start = block_scan<kThreads>(size, entries.count, shared.counts);
    if (mine) {
        shared.starts[threadIdx.x] = start;
        shared.sizes[threadIdx.x] = size;
    }
    __syncthreads();
    for (int chunk = threadIdx.x / 32; chunk < entries.n_chunks; chunk += kWarps)
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
__global__ void __launch_bounds__(kThreads)
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
    for (int i = threadIdx.x; i < how.n_stop; i += kThreads)
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
