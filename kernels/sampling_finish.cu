// The choosing half of sampling: the exact cut, the draw, and the slot's step forward. One block a row.
//
// The cut is found by bisection over the bits of the logit, among the entries that sample_collect found in the
// bins where it lies; then the draw picks a chunk by weight, and an entry of that chunk. The definition is that of
// engine/reference: vocabulary order, float32 weights, the first running sum that exceeds u · total.
#include "ptx.cuh"
#include "reduce.cuh"
#include "sampling_rows.cuh"

using namespace slipstream;

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kChunk / kThreads;  // consecutive entries of a chunk that a thread handles
constexpr int kCached = 2048;             // collected entries kept in shared memory

struct FinishShared {
    uint64 reduction[32];
    int32 counts[32];
    int32 starts[kMostChunks];  // collected entries before each chunk
    int32 ties[kMostChunks];    // equal to the cut: in the chunk, then before it
    uint64 mass[kMostChunks];   // surviving
    float cached_z[kCached];
    int32 chunk;
    uint64 chunk_before;
    int32 token;
};

struct Temper {
    float peak;
    float temperature;
    float min_p;

    __device__ __forceinline__ uint64 weight(float z) const { return fixed_weight(token_weight(z, peak, temperature)); }
    // 0 for what min-p drops.
    __device__ __forceinline__ uint64 surviving(float z) const {
        const float weight = token_weight(z, peak, temperature);
        return min_p > 0.0f && weight < min_p ? 0 : fixed_weight(weight);
    }
    __device__ __forceinline__ int bin(float z) const { return bin_of(z, peak, kBinsPerNat / temperature); }
};

__device__ __forceinline__ uint32 key_of(float z) { return ordered_key(z + 0.0f); }

// Which entries survive: those above `key`, and the first `ties` of those equal to it, in vocabulary order.
struct Cut {
    uint32 key = 0;
    uint64 ties = ~uint64(0);
};

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

    __device__ __forceinline__ float value(int32 id) const { return changed ? processed[id] : to_float(logits[id]); }

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

// Sum of 1 or of the weight over the collected entries that `among` accepts. All threads get it.
template <bool kMass, typename List, typename Among>
__device__ __forceinline__ uint64 measure(const List& entries, const Temper& temper, Among among, uint64* scratch) {
    uint64 sum = 0;
    for (int j = threadIdx.x; j < entries.count; j += kThreads) {
        const float z = entries.z(j);
        if (among(z)) sum += kMass ? temper.weight(z) : 1;
    }
    __syncthreads();
    return block_reduce(sum, Sum{}, uint64(0), scratch);
}

// Where entries among those accepted, largest first, reach `goal` in number or weight. Keeps all if they do not.
template <bool kMass, typename List, typename Among>
__device__ __forceinline__ Cut cut_reaching(const List& entries, const Temper& temper, uint64 goal, Among among,
                                            uint64* scratch) {
    uint32 range[2] = {0, 0};  // the largest key, and the largest complement
    for (int j = threadIdx.x; j < entries.count; j += kThreads) {
        const float z = entries.z(j);
        if (!among(z)) continue;
        range[0] = max(range[0], key_of(z));
        range[1] = max(range[1], ~key_of(z));
    }
    __syncthreads();
    uint32 high = uint32(block_reduce(uint64(range[0]), Max{}, uint64(0), scratch));
    __syncthreads();
    uint32 low = ~uint32(block_reduce(uint64(range[1]), Max{}, uint64(0), scratch));
    if (low > high) return Cut{};
    while (low < high) {
        const uint32 middle = low + (high - low + 1) / 2;
        const auto reaching = [&](float z) { return key_of(z) >= middle && among(z); };
        if (measure<kMass>(entries, temper, reaching, scratch) >= goal)
            low = middle;
        else
            high = middle - 1;
    }
    const uint64 above =
        measure<kMass>(entries, temper, [&](float z) { return key_of(z) > low && among(z); }, scratch);
    if (above >= goal) return Cut{low, 0};
    const uint64 weight = kMass ? temper.weight(key_value(low)) : 1;
    return Cut{low, weight ? (goal - above + weight - 1) / weight : ~uint64(0)};
}

__device__ __forceinline__ uint64 sum_over_chunks(uint64 own, uint64* scratch) {
    __syncthreads();
    return block_reduce(own, Sum{}, uint64(0), scratch);
}

// Applies top-k, then top-p to what is left.
template <typename List>
__device__ __forceinline__ Cut find_cut(const List& entries, const Temper& temper, const SlotSampling& how,
                                        const RowCut& bins, const ChunkMass& own, uint64* scratch) {
    Cut by_count;
    uint64 kept = 0;
    if (bins.bin_k >= 0) {
        const auto in_bin = [&](float z) { return temper.bin(z) == bins.bin_k; };
        by_count = cut_reaching<false>(entries, temper, how.top_k - bins.before_k, in_bin, scratch);
        const auto above = [&](float z) { return key_of(z) > by_count.key && in_bin(z); };
        kept = sum_over_chunks(own.before_k, scratch) + measure<true>(entries, temper, above, scratch) +
               by_count.ties * temper.weight(key_value(by_count.key));
    } else {
        kept = sum_over_chunks(own.all, scratch);
    }
    if (bins.bin_low == kBins) return by_count;
    const uint64 goal = nucleus_goal(how.top_p, kept);
    const uint64 certain = sum_over_chunks(own.certain, scratch);
    const auto in_bins = [&](float z) {
        const int bin = temper.bin(z);
        return bin >= bins.bin_low && bin <= bins.bin_high && key_of(z) >= by_count.key;
    };
    Cut by_mass = cut_reaching<true>(entries, temper, goal > certain ? goal - certain : 1, in_bins, scratch);
    if (by_mass.key < by_count.key) return by_count;
    if (by_mass.key == by_count.key) by_mass.ties = min(by_mass.ties, by_count.ties);
    return by_mass;
}

// Each chunk's surviving weight into shared.mass, and the ties before each chunk into shared.ties.
template <typename Logit>
__device__ __forceinline__ void weigh_chunks(const Entries<Logit>& entries, const Temper& temper, const Cut& cut,
                                             const int32* n_collected, const ChunkMass* masses, FinishShared& shared) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int chunk = warp; chunk < entries.n_chunks; chunk += kWarps) {
        int32 ties = 0;
        for (int j = lane; j < n_collected[chunk]; j += 32) ties += key_of(entries.z(shared.starts[chunk] + j)) == cut.key;
        ties = warp_reduce(ties, Sum{});
        if (lane == 0) shared.ties[chunk] = ties;
    }
    __syncthreads();
    int32 all;
    const int32 before = block_scan<kThreads>(threadIdx.x < entries.n_chunks ? shared.ties[threadIdx.x] : 0, all, shared.counts);
    if (threadIdx.x < entries.n_chunks) shared.ties[threadIdx.x] = before;
    __syncthreads();
    for (int chunk = warp; chunk < entries.n_chunks; chunk += kWarps) {
        uint64 mass = 0;
        uint64 rank = shared.ties[chunk];
        const int count = n_collected[chunk];
        for (int start = 0; start < count; start += 32) {
            const int j = start + lane;
            const float z = j < count ? entries.z(shared.starts[chunk] + j) : -INFINITY;
            const bool ties = j < count && key_of(z) == cut.key;
            const uint32 peers = __ballot_sync(0xffffffffu, ties);
            const bool kept = ties ? rank + __popc(peers & ((1u << lane) - 1)) < cut.ties : key_of(z) > cut.key;
            if (j < count && kept) mass += temper.surviving(z);
            rank += __popc(peers);
        }
        mass = warp_reduce(mass, Sum{});
        if (lane == 0) shared.mass[chunk] = mass + masses[chunk].surviving;
    }
    __syncthreads();
}

// Picks a chunk by shared.mass, then its first entry at which the running sum exceeds the target.
template <typename Logit>
__device__ __forceinline__ int32 draw(const Entries<Logit>& entries, const Temper& temper, const Cut& cut, uint32 word,
                                      int32 vocab, FinishShared& shared) {
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
        weights[i] = key > cut.key || (ties && rank < cut.ties) ? temper.surviving(z[i]) : 0;
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
__device__ __forceinline__ int32 choose(Entries<Logit>& entries, const Temper& temper, const SlotSampling& how,
                                        const SampleScratch& scratch, int row, uint32 word, int32 vocab,
                                        FinishShared& shared) {
    const ChunkMass* masses = scratch.mass + int64(row) * entries.n_chunks;
    const int32* n_collected = scratch.n_collected + int64(row) * entries.n_chunks;
    const bool mine = threadIdx.x < entries.n_chunks;
    Cut cut;
    if (!is_filtered(how, vocab)) {
        if (mine) shared.mass[threadIdx.x] = masses[threadIdx.x].all;
        __syncthreads();
        return draw(entries, temper, cut, word, vocab, shared);
    }
    const int32 start = block_scan<kThreads>(mine ? n_collected[threadIdx.x] : 0, entries.count, shared.counts);
    if (mine) shared.starts[threadIdx.x] = start;
    __syncthreads();
    for (int chunk = threadIdx.x / 32; chunk < entries.n_chunks; chunk += kWarps)
        for (int j = threadIdx.x % 32; j < n_collected[chunk] && shared.starts[chunk] + j < kCached; j += 32)
            shared.cached_z[shared.starts[chunk] + j] = entries.fetch(chunk, j);
    __syncthreads();
    const ChunkMass own = mine ? masses[threadIdx.x] : ChunkMass{};
    cut = find_cut(entries, temper, how, scratch.cut[row], own, shared.reduction);
    weigh_chunks(entries, temper, cut, n_collected, masses, shared);
    return draw(entries, temper, cut, word, vocab, shared);
}

}  // namespace

// After sample_collect, or after sample_scan where all rows are greedy. tokens: int32 [rows], −1 where none was sampled; statuses: int32 [rows] RowStatus.
// A sampled row's slot moves on: last_token, output_count, position + 1, active = not stopped, count table.
// A row whose logits leave nothing to choose from is a fault, and its slot becomes inactive.
// Grid (rows), 512 threads.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    sample_finish(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                  const SampleScratch scratch, int32* __restrict__ tokens, int32* __restrict__ statuses, int32 stride,
                  int32 n_chunks, int32 first_token) {
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
        const Temper temper{peak, how.temperature, how.min_p};
        Entries<Logit> entries{logits + int64(row) * stride, scratch.processed + int64(row) * stride,
                               scratch.collected + first_chunk * kChunk, shared.starts, shared.cached_z,
                               needs_processing(how, output_count), n_chunks, 0};
        token = choose(entries, temper, how, scratch, row, philox_word(how.seed, uint64(output_count)), slots.vocab, shared);
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
