// The scanning half of sampling: four launches over all rows, three of them by chunks of 4,096 entries. A block
// takes every gridDim.x-th chunk of its row: one where rows are few, several where that saves work per block.
//
//   sample_scan     penalties, bias and early-stop ban; the most likely token of each chunk
//   sample_weigh    each chunk's weight, and a histogram of the row by distance from its peak
//   sample_cut      the bins of the histogram where top-k and top-p cut
//   sample_collect  the few entries in those bins, in vocabulary order, and the weight of those before them
//
// sampling_finish.cu chooses. No sorting, and weights are summed as integers: any order gives the same bits.
#include "ptx.cuh"
#include "reduce.cuh"
#include "sampling_rows.cuh"

using namespace slipstream;

namespace {

constexpr int kThreads = 256;
constexpr int kFours = kChunk / (4 * kThreads);  // groups of four consecutive entries that a thread handles
constexpr float kBinUnit = 131072.0f;  // 2^17: a block's sum of a bin over four chunks fits in 32 bits
constexpr double kBinError = 1e-4;     // generous: bin masses are right to 1e−5

// A weight relative to the largest of its bin, from the distance in bins: exp(−x) for x < 1/64, to 6e−7.
__device__ __forceinline__ uint32 weight_in_bin(float distance, int bin) {
    const float x = (distance - bin) * (1.0f / kBinsPerNat);
    return __float2uint_rn((1.0f - x + 0.5f * x * x) * kBinUnit);
}

}  // namespace

// logits: Logit [rows, stride]; entries from slots.vocab on are padding. row_slot: int32 [rows], −1 for
// padding. first_token: 1 if the rows end a prefill (their slots are not active yet), 0 if they decode. Grid
// (chunks, rows), 256 threads; also clears the row's histogram.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    sample_scan(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                const SampleScratch scratch, int32 stride, int32 first_token) {
    __shared__ float values[kChunk];
    __shared__ uint64 reduction[32];
    wait_for_previous_kernels();
    allow_next_kernel();
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
            if (local >= 0 && local < count)
                values[local] += slots.bias_values[int64(slot) * slots.max_bias + i];
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

// After sample_scan. Grid (at least ⌈chunks / 4⌉, rows), 256 threads.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    sample_weigh(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                 const SampleScratch scratch, int32 stride, int32 n_chunks, int32 first_token) {
    __shared__ int32 counts[kBins];
    __shared__ uint32 masses[kBins];
    __shared__ uint64 reduction[32];
    wait_for_previous_kernels();
    allow_next_kernel();
    const int row = blockIdx.y;
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
    const Temper temper(peak, how.temperature, kBinsPerNat);
    for (int chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) {
        uint64 mass = 0;
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            float z[4];
            load_processed(logits + int64(row) * stride, scratch.processed + int64(row) * stride, changed,
                           chunk * kChunk + (i * kThreads + threadIdx.x) * 4, slots.vocab, z);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                mass += fixed_weight(temper.weight(z[j]));
                const float distance = (peak - z[j]) * temper.bins_per_unit;
                if (cuts && distance < kBins - 1) {  // what is in the last bin follows from the rest
                    const int bin = bin_of(z[j], temper);
                    atomicAdd(&counts[bin], 1);
                    atomicAdd(&masses[bin], weight_in_bin(distance, bin));
                }
            }
        }
        __syncthreads();
        mass = block_reduce(mass, Sum{}, uint64(0), reduction);
        if (threadIdx.x == 0) scratch.mass[int64(row) * n_chunks + chunk].all = mass;
    }
    __syncthreads();
    if (!cuts) return;
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
        if (counts[i] == 0) continue;
        atomicAdd(&scratch.bin_counts[int64(row) * kBins + i], counts[i]);
        atomicAdd(&scratch.bin_masses[int64(row) * kBins + i], uint64(masses[i]));
    }
}

namespace {

struct CutShared {
    RowCut cut;
    double mass_before_k;
    double mass_through_k;
    double masses[32];
    int32 counts[32];
};

// Finds the bins of both cuts from the row's histogram. All threads of the block get it.
__device__ __forceinline__ RowCut find_bins(const SlotSampling& how, int32 vocab, const int32* counts,
                                            const uint64* masses, uint64 row_mass, CutShared& shared) {
    constexpr int kEach = kBins / kThreads;
    const int first = threadIdx.x * kEach;
    int32 count[kEach];
    double mass[kEach];
    int32 own_count = 0;
    double own_mass = 0.0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        count[i] = counts[first + i];
        mass[i] = double(masses[first + i]) * expf(-(first + i) / kBinsPerNat) / kBinUnit;
        own_count += count[i];
        own_mass += mass[i];
    }
    if (threadIdx.x == 0) shared.cut = RowCut{kBins, 0, kBins, kBins - 2};
    int32 all_counts;
    double all_masses;
    const int32 count_before = block_scan<kThreads>(own_count, all_counts, shared.counts);
    const double mass_before = block_scan<kThreads>(own_mass, all_masses, shared.masses);
    if (how.top_k > 0 && how.top_k < vocab && count_before < how.top_k &&
        count_before + own_count >= how.top_k) {
        int32 running = count_before;
        double through = mass_before;
        for (int i = 0; i < kEach; ++i) {
            if (running < how.top_k && running + count[i] >= how.top_k) {
                shared.cut.bin_k = first + i;
                shared.cut.before_k = running;
                shared.mass_before_k = through;
                shared.mass_through_k = through + mass[i];
            }
            running += count[i];
            through += mass[i];
        }
    }
    __syncthreads();
    const int32 bin_k = shared.cut.bin_k;
    if (how.top_p < 1.0) {
        const double unit = 17592186044416.0;  // of fixed_weight
        const bool by_count = bin_k < kBins;
        const double least =
            how.top_p * (by_count ? shared.mass_before_k : row_mass / unit) * (1.0 - kBinError);
        const double most =
            how.top_p * (by_count ? shared.mass_through_k : row_mass / unit) * (1.0 + kBinError);
        double through = mass_before;
        int low = kBins, high = kBins;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            through += mass[i];
            if (count[i] && through * (1.0 + kBinError) >= least) low = min(low, first + i);
            if (count[i] && through * (1.0 - kBinError) >= most) high = min(high, first + i);
        }
        if (low < kBins) atomicMin(&shared.cut.bin_low, low);
        if (high < kBins) atomicMin(&shared.cut.bin_high, high);
    }
    __syncthreads();
    RowCut cut = shared.cut;
    if (cut.bin_k == kBins) cut.bin_k = -1;
    return cut;
}

}  // namespace

// After sample_weigh: where the cuts of each row lie. Grid (rows), 256 threads.
__global__ void __launch_bounds__(kThreads)
    sample_cut(const int32* __restrict__ row_slot, const SlotArrays slots, const SampleScratch scratch,
               int32 n_chunks, int32 first_token) {
    __shared__ CutShared shared;
    __shared__ uint64 reduction[32];
    wait_for_previous_kernels();
    allow_next_kernel();
    const int row = blockIdx.x;
    const int32 slot = slot_of(slots, row_slot, row, first_token);
    if (slot < 0) return;
    const SlotSampling how = slots.sampling[slot];
    if (how.temperature == 0.0f || !is_filtered(how, slots.vocab)) return;
    RowCut cut{-1, 0, kBins, kBins - 2};
    if (has_cut(how, slots.vocab)) {
        const uint64 own = threadIdx.x < n_chunks ? scratch.mass[int64(row) * n_chunks + threadIdx.x].all : 0;
        const uint64 row_mass = block_reduce(own, Sum{}, uint64(0), reduction);
        cut = find_bins(how, slots.vocab, scratch.bin_counts + int64(row) * kBins,
                        scratch.bin_masses + int64(row) * kBins, row_mass, shared);
    }
    if (threadIdx.x == 0) scratch.cut[row] = cut;
}

// After sample_cut. Grid (at most chunks, rows), 256 threads.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    sample_collect(const Logit* __restrict__ logits, const int32* __restrict__ row_slot, const SlotArrays slots,
                   const SampleScratch scratch, int32 stride, int32 n_chunks, int32 first_token) {
    __shared__ uint64 reduction[5][32];
    wait_for_previous_kernels();
    allow_next_kernel();
    const int row = blockIdx.y;
    const int32 slot = slot_of(slots, row_slot, row, first_token);
    if (slot < 0) return;
    const SlotSampling how = slots.sampling[slot];
    if (how.temperature == 0.0f || !is_filtered(how, slots.vocab)) return;
    const int64 first_chunk = int64(row) * n_chunks;
    int32 bad;
    const float peak = ranked_value(row_best(scratch.best + first_chunk, n_chunks, bad, reduction[0]));
    const bool changed = needs_processing(how, slots.output_count[slot]);
    const RowCut cut = scratch.cut[row];
    const int first_doubtful = cut.first_doubtful();
    const int before_k = cut.bin_low < kBins ? cut.bin_k : -1;  // its weight matters to top-p alone
    const Temper temper(peak, how.temperature, kBinsPerNat);
    for (int chunk = blockIdx.x; chunk < n_chunks; chunk += gridDim.x) {
        uint64 certain = 0, surviving = 0, mass_before_k = 0;
        uint32 keeps = 0;   // one bit an entry
        uint64 counts = 0;  // of the entries kept, 16 bits for each group of four
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            const int id = chunk * kChunk + (i * kThreads + threadIdx.x) * 4;
            float z[4];
            load_processed(logits + int64(row) * stride, scratch.processed + int64(row) * stride, changed, id,
                           slots.vocab, z);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int bin = bin_of(z[j], temper);
                if (bin < first_doubtful || bin < before_k) {
                    const float weight = temper.weight(z[j]);
                    const uint64 fixed = fixed_weight(weight);
                    if (bin < before_k) mass_before_k += fixed;
                    if (bin < first_doubtful) {
                        certain += fixed;
                        surviving += how.min_p > 0.0f && weight < how.min_p ? 0 : fixed;
                    }
                }
                if (cut.holds(bin) && id + j < slots.vocab) {
                    keeps |= 1u << (i * 4 + j);
                    counts += uint64(1) << (i * 16);
                }
            }
        }
        uint64 totals;
        const uint64 before = block_scan<kThreads>(counts, totals, reduction[2]);
        const int64 place_of_chunk = first_chunk + chunk;
        int32 place = 0;
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            int32 mine = place + int32(before >> (i * 16) & 0xffff);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (keeps >> (i * 4 + j) & 1)
                    scratch.collected[place_of_chunk * kChunk + mine++] =
                        static_cast<unsigned short>((i * kThreads + threadIdx.x) * 4 + j);
            place += int32(totals >> (i * 16) & 0xffff);
        }
        certain = block_reduce(certain, Sum{}, uint64(0), reduction[0]);
        surviving = block_reduce(surviving, Sum{}, uint64(0), reduction[3]);
        mass_before_k = block_reduce(mass_before_k, Sum{}, uint64(0), reduction[4]);
        if (threadIdx.x == 0) {
            scratch.mass[place_of_chunk].certain = certain;
            scratch.mass[place_of_chunk].surviving = surviving;
            scratch.mass[place_of_chunk].before_k = mass_before_k;
            scratch.n_collected[place_of_chunk] = place;
        }
        __syncthreads();
    }
}
