// One token per row of logits, chosen, checked against the stop list and taken over by its slot on the device.
//
// Four launches, each over all rows; the first three split a row into chunks of 4,096 entries:
//   sample_scan     penalties, bias and early-stop ban; the most likely token of each chunk
//   sample_weigh    the chunk's total weight, and a histogram of the row by distance from its peak
//   sample_collect  the entries that the histogram cannot rule out of top-k and top-p, in vocabulary order
//   sample_finish   the exact cut among those, the draw, and the slot's step forward
// A batch that is greedy throughout needs the first and the last only.
//
// No sorting: the cut is found by bisection over the bits of the logit, on the entries that were collected.
// Weights are integers, so sums have the same bits in any order. The definition of the draw is that of
// engine/reference: vocabulary order, float32 weights, the first running sum that exceeds u · total.
#include "ptx.cuh"
#include "reduce.cuh"
#include "sampling.cuh"
#include "slots.cuh"

using namespace slipstream;

namespace {

constexpr int kThreads = 256;          // of the scanning kernels
constexpr int kFinishThreads = 512;
constexpr int kBins = 2048;            // of the histogram …
constexpr float kBinsPerNat = 64.0f;   // … so it reaches 32 nats below the peak; the last bin takes the rest
constexpr int kMostChunks = 128;
constexpr int kCached = 2048;          // collected entries kept in shared memory

struct ChunkBest {
    uint64 best;     // ranked() of the chunk's most likely token after processing
    int32 bad;       // a raw logit is NaN or +inf
    int32 unused;
};

// Per-step buffers, [rows] × …
struct SampleScratch {
    float* processed;        // [rows, stride] written only for rows that need processing
    ChunkBest* best;         // [rows, chunks]
    uint64* mass;            // [rows, chunks]
    int32* bin_counts;       // [rows, kBins]
    uint64* bin_masses;      // [rows, kBins]
    int32* n_collected;      // [rows, chunks]
    unsigned short* collected;  // [rows, chunks, kChunk] offsets in the chunk
};

enum RowStatus { kNoToken = 0, kToken = 1, kStopped = 2, kFault = 3 };

__device__ __forceinline__ int32 slot_of(const SlotArrays& slots, const int32* row_slot, int row, int32 first_token) {
    const int32 slot = row_slot[row];
    return slot >= 0 && (first_token || slots.active[slot]) ? slot : -1;
}

__device__ __forceinline__ bool bans_stops(const SlotSampling& how, int32 output_count) {
    return how.n_stop > 0 && output_count < how.min_tokens;
}

__device__ __forceinline__ bool needs_processing(const SlotSampling& how, int32 output_count) {
    return how.penalised || how.n_bias > 0 || bans_stops(how, output_count);
}

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

__device__ __forceinline__ int bin_of(float z, float peak, float bins_per_unit) {
    const float distance = (peak - z) * bins_per_unit;
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

}  // namespace

// logits: Logit [rows, stride]; entries from slots.vocab on are padding. row_slot: int32 [rows], −1 for padding.
// first_token: 1 if the rows end a prefill (their slots are not active yet), 0 if they decode.
// Grid (chunks, rows), 256 threads; also clears the row's histogram.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    sample_scan(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                const SampleScratch scratch, int32 stride, int32 first_token) {
    __shared__ float values[kChunk];
    __shared__ uint64 reduction[32];
    allow_next_kernel();
    wait_for_previous_kernels();
    const int row = blockIdx.y;
    const int n_chunks = gridDim.x;
    const int32 slot = slot_of(slots, row_slot, row, first_token);
    if (slot < 0) return;
    const SlotSampling how = slots.sampling[slot];
    const int32 output_count = slots.output_count[slot];
    const bool changes = needs_processing(how, output_count);
    const int base = blockIdx.x * kChunk;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < kBins; i += n_chunks * kThreads) {
        scratch.bin_counts[int64(row) * kBins + i] = 0;
        scratch.bin_masses[int64(row) * kBins + i] = 0;
    }

    uint64 best = 0;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < kChunk / (4 * kThreads); ++i) {
        const int local = (i * kThreads + threadIdx.x) * 4;
        const int first = base + local;
        float z[4];
        load_four(logits + int64(row) * stride, first, slots.vocab, z);
#pragma unroll
        for (int j = 0; j < 4; ++j) bad |= !(z[j] < INFINITY);
        if (changes) {
            if (how.penalised) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (first + j < slots.vocab)
                        z[j] = penalised(z[j], slots.counts[int64(slot) * slots.vocab + first + j], how);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) values[local + j] = z[j];
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (first + j < slots.vocab) best = Max{}(best, ranked(z[j], first + j));
        }
    }
    if (changes) {
        const int count = min(kChunk, slots.vocab - base);
        __syncthreads();
        for (int i = threadIdx.x; i < how.n_bias; i += kThreads) {
            const int local = slots.bias_ids[int64(slot) * slots.max_bias + i] - base;
            if (local >= 0 && local < count) values[local] += slots.bias_values[int64(slot) * slots.max_bias + i];
        }
        __syncthreads();
        if (bans_stops(how, output_count)) {
            for (int i = threadIdx.x; i < how.n_stop; i += kThreads) {
                const int local = slots.stop_ids[int64(slot) * slots.max_stop + i] - base;
                if (local >= 0 && local < count) values[local] = -INFINITY;
            }
        }
        __syncthreads();
        for (int local = threadIdx.x; local < count; local += kThreads) {
            scratch.processed[int64(row) * stride + base + local] = values[local];
            best = Max{}(best, ranked(values[local], base + local));
        }
    }
    best = block_reduce(best, Max{}, uint64(0), reduction);
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) scratch.best[int64(row) * n_chunks + blockIdx.x] = ChunkBest{best, bad, 0};
}

// After sample_scan, same grid and block.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    sample_weigh(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                 const SampleScratch scratch, int32 stride, int32 first_token) {
    __shared__ int32 counts[kBins];
    __shared__ uint64 masses[kBins];
    __shared__ uint64 reduction[32];
    allow_next_kernel();
    wait_for_previous_kernels();
    const int row = blockIdx.y;
    const int n_chunks = gridDim.x;
    const int32 slot = slot_of(slots, row_slot, row, first_token);
    if (slot < 0) return;
    const SlotSampling how = slots.sampling[slot];
    if (how.temperature == 0.0f) return;
    const bool cuts = has_cut(how, slots.vocab);
    if (cuts) {
        for (int i = threadIdx.x; i < kBins; i += kThreads) {
            counts[i] = 0;
            masses[i] = 0;
        }
    }
    int32 bad;
    const float peak = ranked_value(row_best(scratch.best + int64(row) * n_chunks, n_chunks, bad, reduction));
    const bool changed = needs_processing(how, slots.output_count[slot]);
    const float bins_per_unit = kBinsPerNat / how.temperature;
    uint64 mass = 0;
#pragma unroll
    for (int i = 0; i < kChunk / (4 * kThreads); ++i) {
        float z[4];
        load_processed(logits + int64(row) * stride, scratch.processed + int64(row) * stride, changed,
                       blockIdx.x * kChunk + (i * kThreads + threadIdx.x) * 4, slots.vocab, z);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint64 weight = fixed_weight(token_weight(z[j], peak, how.temperature));
            mass += weight;
            const int bin = bin_of(z[j], peak, bins_per_unit);
            if (cuts && bin < kBins - 1) {  // what is in the last bin weighs nothing and follows from the rest
                atomicAdd(&counts[bin], 1);
                atomicAdd(&masses[bin], weight);
            }
        }
    }
    __syncthreads();
    mass = block_reduce(mass, Sum{}, uint64(0), reduction);
    if (threadIdx.x == 0) scratch.mass[int64(row) * n_chunks + blockIdx.x] = mass;
    if (!cuts) return;
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
        if (counts[i] == 0) continue;
        atomicAdd(&scratch.bin_counts[int64(row) * kBins + i], counts[i]);
        atomicAdd(&scratch.bin_masses[int64(row) * kBins + i], masses[i]);
    }
}

namespace {

// Exclusive running sum over the block; `total` is the whole block's. `scratch`: 32 elements.
template <int kBlock, typename T>
__device__ __forceinline__ T block_scan(T value, T& total, T* scratch) {
    const int lane = threadIdx.x % 32;
    T inclusive = value;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const T left = __shfl_up_sync(0xffffffffu, inclusive, offset);
        if (lane >= offset) inclusive += left;
    }
    __syncthreads();
    if (lane == 31) scratch[threadIdx.x / 32] = inclusive;
    __syncthreads();
    T before = 0;
    total = 0;
#pragma unroll
    for (int warp = 0; warp < kBlock / 32; ++warp) {
        if (warp < int(threadIdx.x / 32)) before += scratch[warp];
        total += scratch[warp];
    }
    return before + inclusive - value;
}

// The least `kept` mass that top-p asks for.
__device__ __forceinline__ uint64 nucleus_goal(double top_p, uint64 mass) {
    const double goal = ceil(top_p * double(mass));
    return goal < 1.0 ? 1 : (goal >= double(mass) ? mass : uint64(goal));
}

// The last histogram bin that top-k and top-p may reach into.
__device__ __forceinline__ int last_bin(const SlotSampling& how, int32 vocab, const int32* counts, const uint64* masses,
                                        uint64 total_mass, int32* count_scratch, uint64* mass_scratch, int32* result) {
    constexpr int kEach = kBins / kThreads;
    int32 count = 0;
    uint64 mass = 0;
    for (int i = 0; i < kEach; ++i) {
        count += counts[threadIdx.x * kEach + i];
        mass += masses[threadIdx.x * kEach + i];
    }
    if (threadIdx.x == 0) *result = kBins - 1;
    int32 all_counts;
    uint64 all_masses;
    int32 count_before = block_scan<kThreads>(count, all_counts, count_scratch);
    uint64 mass_before = block_scan<kThreads>(mass, all_masses, mass_scratch);
    const bool by_count = how.top_k > 0 && how.top_k < vocab;  // top-p then needs the weight of all top k
    const int32 count_goal = by_count ? how.top_k : 0x7fffffff;
    const uint64 mass_goal = by_count ? ~uint64(0) : nucleus_goal(how.top_p, total_mass);
    for (int i = 0; i < kEach; ++i) {
        const int bin = threadIdx.x * kEach + i;
        count_before += counts[bin];
        mass_before += masses[bin];
        if (count_before >= count_goal || mass_before >= mass_goal) {
            atomicMin(result, bin);
            break;
        }
    }
    __syncthreads();
    return *result;
}

__device__ __forceinline__ uint64 row_mass(const uint64* masses, int n_chunks, uint64* scratch) {
    return block_reduce(threadIdx.x < n_chunks ? masses[threadIdx.x] : uint64(0), Sum{}, uint64(0), scratch);
}

}  // namespace

// After sample_weigh, same grid and block.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    sample_collect(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                   const SampleScratch scratch, int32 stride, int32 first_token) {
    __shared__ uint64 reduction[3][32];
    __shared__ int32 count_scratch[32];
    __shared__ int32 bin_result;
    allow_next_kernel();
    wait_for_previous_kernels();
    const int row = blockIdx.y;
    const int n_chunks = gridDim.x;
    const int32 slot = slot_of(slots, row_slot, row, first_token);
    if (slot < 0) return;
    const SlotSampling how = slots.sampling[slot];
    if (how.temperature == 0.0f || !is_filtered(how, slots.vocab)) return;
    int32 bad;
    const float peak = ranked_value(row_best(scratch.best + int64(row) * n_chunks, n_chunks, bad, reduction[0]));
    const bool changed = needs_processing(how, slots.output_count[slot]);
    int last = kBins - 1;
    if (has_cut(how, slots.vocab)) {
        const uint64 total = row_mass(scratch.mass + int64(row) * n_chunks, n_chunks, reduction[1]);
        last = last_bin(how, slots.vocab, scratch.bin_counts + int64(row) * kBins,
                        scratch.bin_masses + int64(row) * kBins, total, count_scratch, reduction[2], &bin_result);
    }
    const float bins_per_unit = kBinsPerNat / how.temperature;
    const int64 chunk = int64(row) * n_chunks + blockIdx.x;
    const bool drops_by_min_p = how.min_p > 0.0f && how.top_p >= 1.0;  // top-p counts what min-p drops after it
    int32 collected = 0;
#pragma unroll 1
    for (int i = 0; i < kChunk / (4 * kThreads); ++i) {
        const int local = (i * kThreads + threadIdx.x) * 4;
        float z[4];
        load_processed(logits + int64(row) * stride, scratch.processed + int64(row) * stride, changed,
                       blockIdx.x * kChunk + local, slots.vocab, z);
        bool keeps[4];
        int32 count = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            keeps[j] = blockIdx.x * kChunk + local + j < slots.vocab && bin_of(z[j], peak, bins_per_unit) <= last &&
                       (!drops_by_min_p || token_weight(z[j], peak, how.temperature) >= how.min_p);
            count += keeps[j];
        }
        int32 total;
        int32 place = collected + block_scan<kThreads>(count, total, count_scratch);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (keeps[j]) scratch.collected[chunk * kChunk + place++] = static_cast<unsigned short>(local + j);
        collected += total;
    }
    if (threadIdx.x == 0) scratch.n_collected[chunk] = collected;
}

namespace {

// The entries to choose from, in vocabulary order.
template <typename Logit>
struct Entries {
    const Logit* logits;      // of the row
    const float* processed;   // of the row
    const unsigned short* collected;
    const int32* starts;      // shared: entries before each chunk
    const float* cached_z;    // shared
    const int32* cached_id;   // shared
    bool changed;
    int32 n_chunks;
    int32 count;

    __device__ __forceinline__ float value(int32 id) const { return changed ? processed[id] : to_float(logits[id]); }

    __device__ __forceinline__ int32 fetch_id(int j) const {
        int low = 0, high = n_chunks - 1;  // the last chunk that starts at or before j
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (starts[middle] <= j)
                low = middle;
            else
                high = middle - 1;
        }
        return low * kChunk + collected[int64(low) * kChunk + j - starts[low]];
    }

    __device__ __forceinline__ int32 id(int j) const { return j < kCached ? cached_id[j] : fetch_id(j); }
    __device__ __forceinline__ float z(int j) const { return j < kCached ? cached_z[j] : value(fetch_id(j)); }
};

// Which entries survive: those above `key`, and the first `ties` of those equal to it, in vocabulary order.
struct Cut {
    uint32 key;
    uint64 ties;
};

struct Temper {
    float peak;
    float temperature;
    __device__ __forceinline__ uint64 weight(float z) const { return fixed_weight(token_weight(z, peak, temperature)); }
};

// Sum over entries with key ≥ `key` (or > with kAbove) of 1 or of their weight. All threads get it.
template <bool kAbove, bool kMass, typename List>
__device__ __forceinline__ uint64 measure(const List& entries, const Temper& temper, uint32 key, uint64* scratch) {
    uint64 sum = 0;
    for (int j = threadIdx.x; j < entries.count; j += kFinishThreads) {
        const float z = entries.z(j);
        const uint32 own = ordered_key(z + 0.0f);
        if (kAbove ? own > key : own >= key) sum += kMass ? temper.weight(z) : 1;
    }
    __syncthreads();
    return block_reduce(sum, Sum{}, uint64(0), scratch);
}

// The largest key at which the measure of the entries not below it reaches `goal`, among keys from `lowest` on.
template <bool kMass, typename List>
__device__ __forceinline__ uint32 key_reaching(const List& entries, const Temper& temper, uint64 goal, uint32 lowest,
                                               uint64* scratch) {
    uint32 low = lowest;  // always reaches the goal
    uint32 high = ordered_key(temper.peak + 0.0f);
    while (low < high) {
        const uint32 middle = low + (high - low + 1) / 2;
        if (measure<false, kMass>(entries, temper, middle, scratch) >= goal)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// How many of the equal entries at the cut it takes to get from `above` to `goal`.
__device__ __forceinline__ uint64 ties_reaching(uint64 goal, uint64 above, uint64 weight) {
    return weight ? (goal - above + weight - 1) / weight : ~uint64(0);
}

// Applies top-k, then top-p to what is left. row_mass: of all the vocabulary.
template <typename List>
__device__ __forceinline__ Cut find_cut(const List& entries, const Temper& temper, const SlotSampling& how, int32 vocab,
                                        uint64 row_mass, uint64* scratch) {
    uint32 lowest = ~0u;
    for (int j = threadIdx.x; j < entries.count; j += kFinishThreads)
        lowest = min(lowest, ordered_key(entries.z(j) + 0.0f));
    __syncthreads();
    lowest = uint32(~block_reduce(uint64(~lowest), Max{}, uint64(0), scratch));
    Cut cut{lowest, ~uint64(0)};
    uint64 kept = row_mass;
    const bool counts = how.top_k > 0 && how.top_k < vocab;
    if (counts && how.top_k < entries.count) {
        cut.key = key_reaching<false>(entries, temper, how.top_k, lowest, scratch);
        cut.ties = how.top_k - measure<true, false>(entries, temper, cut.key, scratch);
        if (how.top_p < 1.0)
            kept = measure<true, true>(entries, temper, cut.key, scratch) + cut.ties * temper.weight(key_value(cut.key));
    } else if (counts && how.top_p < 1.0) {
        kept = measure<false, true>(entries, temper, lowest, scratch);
    }
    if (how.top_p >= 1.0) return cut;
    const uint64 goal = nucleus_goal(how.top_p, kept);
    const uint32 key = key_reaching<true>(entries, temper, goal, cut.key, scratch);
    const uint64 above = measure<true, true>(entries, temper, key, scratch);
    const uint64 ties = ties_reaching(goal, above, temper.weight(key_value(key)));
    return Cut{key, key == cut.key ? min(cut.ties, ties) : ties};
}

// The first place at which the running sum of weight(0), weight(1), … exceeds `target`; −1 if none does.
// weight is called by all threads of the block together. All threads get the result.
template <typename Weight>
__device__ __forceinline__ int first_exceeding(int count, Weight weight, uint64 target, uint64* scratch, int* result) {
    if (threadIdx.x == 0) *result = -1;
    uint64 before = 0;
    for (int start = 0; start < count && before <= target; start += kFinishThreads) {
        const int j = start + threadIdx.x;
        const uint64 own = weight(j);
        uint64 total;
        const uint64 running = before + block_scan<kFinishThreads>(own, total, scratch);
        if (running <= target && running + own > target) *result = j;
        before += total;
    }
    __syncthreads();
    return *result;
}

struct FinishShared {
    uint64 reduction[32];
    int32 counts[32];
    int32 starts[kMostChunks];
    float cached_z[kCached];
    int32 cached_id[kCached];
    int place;
    int chunk;
    uint64 chunk_before;
};

// A draw from the whole vocabulary: first the chunk, then the entry in it.
template <typename Logit>
__device__ __forceinline__ int32 draw_from_all(const Entries<Logit>& entries, const Temper& temper, const uint64* masses,
                                               uint32 word, int32 vocab, FinishShared& shared) {
    const uint64 own = threadIdx.x < entries.n_chunks ? masses[threadIdx.x] : 0;
    uint64 total;
    const uint64 before = block_scan<kFinishThreads>(own, total, shared.reduction);
    const uint64 target = draw_target(total, word);
    if (own && before <= target && before + own > target) {
        shared.chunk = threadIdx.x;
        shared.chunk_before = before;
    }
    __syncthreads();
    const int32 base = shared.chunk * kChunk;
    const int count = min(kChunk, vocab - base);
    const int place = first_exceeding(
        count, [&](int j) { return j < count ? temper.weight(entries.value(base + j)) : uint64(0); },
        target - shared.chunk_before, shared.reduction, &shared.place);
    return place < 0 ? -1 : base + place;
}

// A draw from the collected entries that survive the cut and min-p.
template <typename Logit>
__device__ __forceinline__ int32 draw_from_cut(const Entries<Logit>& entries, const Temper& temper,
                                               const SlotSampling& how, int32 vocab, uint64 row_mass, uint32 word,
                                               FinishShared& shared) {
    const Cut cut = find_cut(entries, temper, how, vocab, row_mass, shared.reduction);
    uint64 ties_before = 0;
    const auto surviving = [&](int j) -> uint64 {  // called by the whole block: ranks the ties of this stretch
        const float z = j < entries.count ? entries.z(j) : -INFINITY;
        const uint32 key = ordered_key(z + 0.0f);
        const bool ties = j < entries.count && key == cut.key;
        uint64 all_ties;
        const uint64 rank = ties_before + block_scan<kFinishThreads>(uint64(ties), all_ties, shared.reduction);
        ties_before += all_ties;
        if (j >= entries.count || key < cut.key || (ties && rank >= cut.ties)) return 0;
        const float weight = token_weight(z, temper.peak, temper.temperature);
        return how.min_p > 0.0f && weight < how.min_p ? 0 : fixed_weight(weight);
    };
    uint64 total = 0;
    for (int start = 0; start < entries.count; start += kFinishThreads) total += surviving(start + threadIdx.x);
    __syncthreads();
    total = block_reduce(total, Sum{}, uint64(0), shared.reduction);
    ties_before = 0;
    const int place = first_exceeding(entries.count, surviving, draw_target(total, word), shared.reduction, &shared.place);
    return place < 0 ? -1 : entries.id(place);
}

}  // namespace

// The last of the four. tokens: int32 [rows], −1 where none was sampled; statuses: int32 [rows] RowStatus.
// A sampled row's slot moves on: last_token, output_count, position + 1, active = not stopped, count table.
// A row whose logits leave nothing to choose from is a fault, and its slot becomes inactive.
// Grid (rows), 512 threads.
template <typename Logit>
__global__ void __launch_bounds__(kFinishThreads)
    sample_finish(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                  const SampleScratch scratch, int32* __restrict__ tokens, int32* __restrict__ statuses, int32 stride,
                  int32 n_chunks, int32 first_token) {
    __shared__ FinishShared shared;
    allow_next_kernel();
    wait_for_previous_kernels();
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
        const Temper temper{peak, how.temperature};
        const uint32 word = philox_word(how.seed, uint64(output_count));
        Entries<Logit> entries{logits + int64(row) * stride, scratch.processed + int64(row) * stride,
                               scratch.collected + first_chunk * kChunk, shared.starts, shared.cached_z, shared.cached_id,
                               needs_processing(how, output_count), n_chunks, 0};
        __syncthreads();
        if (is_filtered(how, slots.vocab)) {
            const int32 own = threadIdx.x < n_chunks ? scratch.n_collected[first_chunk + threadIdx.x] : 0;
            const int32 start = block_scan<kFinishThreads>(own, entries.count, shared.counts);
            if (threadIdx.x < n_chunks) shared.starts[threadIdx.x] = start;
            __syncthreads();
            for (int j = threadIdx.x; j < min(entries.count, kCached); j += kFinishThreads) {
                const int32 id = entries.fetch_id(j);
                shared.cached_id[j] = id;
                shared.cached_z[j] = entries.value(id);
            }
            const uint64 mass = row_mass(scratch.mass + first_chunk, n_chunks, shared.reduction);
            __syncthreads();
            token = draw_from_cut(entries, temper, how, slots.vocab, mass, word, shared);
        } else {
            token = draw_from_all(entries, temper, scratch.mass + first_chunk, word, slots.vocab, shared);
        }
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
