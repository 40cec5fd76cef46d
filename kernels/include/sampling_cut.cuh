// Cutting a row's distribution: its collected entries, and where they reach a number or a weight.
#pragma once

#include "reduce.cuh"
#include "sampling_rows.cuh"

namespace slipstream {

constexpr int kFinishThreads = 512;  // of the block that chooses for a row
constexpr int kFinishWarps = kFinishThreads / 32;
constexpr int kEach = kChunk / kFinishThreads;  // consecutive entries of a chunk that a thread handles
constexpr int kRanked = 256;                    // up to so many, comparing all with all beats bisection
constexpr int kCached = 2048;                   // collected entries kept in shared memory

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
    static constexpr int kHeld = kCached / kFinishThreads;
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
            const int j = i * kFinishThreads + threadIdx.x;
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
        for (int j = kCached + threadIdx.x; j < entries.count; j += kFinishThreads) {
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

}  // namespace slipstream
