// A slot's state on the device, as sampling and slot control share it. Knows no kernel.
#pragma once

#include "types.cuh"

namespace slipstream {

// How a slot's tokens are chosen. kernels/slots.py has the same layout as a numpy dtype.
struct alignas(8) SlotSampling {
    uint64 seed;
    double top_p;              // ≥ 1: off
    float temperature;         // 0: greedy
    float min_p;               // ≤ 0: off
    float repetition_penalty;  // 1: off
    float presence_penalty;
    float frequency_penalty;
    int32 top_k;  // ≤ 0: off
    int32 min_tokens;
    int32 logprobs;   // alternatives to report; −1: no log-probabilities
    int32 n_stop;     // entries of the slot's stop list
    int32 n_bias;     // entries of the slot's bias list
    int32 penalised;  // whether the slot's count table is kept
    int32 unused;
};
static_assert(sizeof(SlotSampling) == 64);

// The arrays of all slots, one struct so that kernels take one argument.
struct SlotArrays {
    SlotSampling* sampling;  // [slots]
    int32* position;         // [slots] of the token that the slot feeds next
    int32* active;           // [slots] 1: decodes
    int32* last_token;       // [slots]
    int32* output_count;     // [slots] tokens generated so far
    int32* stop_ids;         // [slots, max_stop]
    int32* bias_ids;         // [slots, max_bias]
    float* bias_values;      // [slots, max_bias]
    uint32* counts;          // [slots, vocab]: kInPrompt, and how often the token stands in the output
    int32 max_stop;
    int32 max_bias;
    int32 vocab;
    int32 unused;
};

constexpr uint32 kInPrompt = 0x80000000u;

}  // namespace slipstream
