// Slot control: what the host changes between steps, applied on the device from small staged lists.
//
// The lists come in one pinned-memory copy with their lengths, so these launches fit in a graph.
#include "ptx.cuh"
#include "slots.cuh"

using namespace slipstream;

namespace {

constexpr int kThreads = 256;

// A slot's new sequence.
struct SlotStart {
    SlotSampling sampling;
    int32 slot;
    int32 n_output;     // tokens generated already
    int32 first_token;  // where its tokens stand in the staged token list: prompt, then output
    int32 n_tokens;     // prompt and output together; 0 where the count table is not needed
    int32 first_stop;   // where its sampling.n_stop stop ids stand in the staged token list
    int32 first_bias;   // where its sampling.n_bias entries stand in the staged bias lists
    int32 unused[2];
};

struct SlotChange {
    int32 slot;
    int32 position;  // −1: stays
    int32 active;    // −1: stays
    int32 unused;
};

struct PageChange {
    int32 slot;
    int32 index;
    int32 page;
    int32 unused;
};

}  // namespace

// changes: SlotChange [n_changes], pages: PageChange [n_pages]; no slot, no table entry twice. counts: int32
// [2], the two lengths. block_table: int32 [slots, table_width]. One block.
extern "C" __global__ void __launch_bounds__(kThreads)
    change_slots(const int32* __restrict__ counts, const SlotChange* __restrict__ changes,
                 const PageChange* __restrict__ pages, const SlotArrays slots, int32* __restrict__ block_table,
                 int32 table_width) {
    wait_for_previous_kernels();
    allow_next_kernel();
    for (int i = threadIdx.x; i < counts[0]; i += kThreads) {
        const SlotChange change = changes[i];
        if (change.position >= 0) slots.position[change.slot] = change.position;
        if (change.active >= 0) slots.active[change.slot] = change.active;
    }
    for (int i = threadIdx.x; i < counts[1]; i += kThreads) {
        const PageChange change = pages[i];
        block_table[int64(change.slot) * table_width + change.index] = change.page;
    }
}

// starts: SlotStart [·]; tokens: int32, bias_ids: int32, bias_values: float32, as the starts point into them.
// The slot becomes inactive at position 0; change_slots sets both when its prefill ends. Grid (starts), 256
// threads.
extern "C" __global__ void __launch_bounds__(kThreads)
    start_slots(const SlotStart* __restrict__ starts, const int32* __restrict__ tokens,
                const int32* __restrict__ bias_ids, const float* __restrict__ bias_values,
                const SlotArrays slots) {
    wait_for_previous_kernels();
    allow_next_kernel();
    const SlotStart start = starts[blockIdx.x];
    const int64 slot = start.slot;
    if (threadIdx.x == 0) {
        slots.sampling[slot] = start.sampling;
        slots.position[slot] = 0;
        slots.active[slot] = 0;
        slots.last_token[slot] = -1;
        slots.output_count[slot] = start.n_output;
    }
    for (int i = threadIdx.x; i < start.sampling.n_stop; i += kThreads)
        slots.stop_ids[slot * slots.max_stop + i] = tokens[start.first_stop + i];
    for (int i = threadIdx.x; i < start.sampling.n_bias; i += kThreads) {
        slots.bias_ids[slot * slots.max_bias + i] = bias_ids[start.first_bias + i];
        slots.bias_values[slot * slots.max_bias + i] = bias_values[start.first_bias + i];
    }
    if (!start.sampling.penalised) return;
    uint32* counts = slots.counts + slot * slots.vocab;
    for (int i = threadIdx.x; i < slots.vocab; i += kThreads) counts[i] = 0;
    __syncthreads();
    const int n_prompt = start.n_tokens - start.n_output;
    for (int i = threadIdx.x; i < start.n_tokens; i += kThreads) {
        const int32 token = tokens[start.first_token + i];
        if (token < 0 || token >= slots.vocab) continue;
        if (i < n_prompt)
            atomicOr(counts + token, kInPrompt);
        else
            atomicAdd(counts + token, 1u);
    }
}
