"""What must hold of a CUDA engine with FP8 weights, with and without a GPU: the reference engine's
log-probabilities, whose weights and activations are rounded alike.

Each scenario takes a loader of engines, an empty folder and a family of tiny models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint import open_checkpoint
from engine.interface import Sampling
from engine.options import Precision
from engine.reference import ReferenceEngine
from tests.cuda_scenarios import Load, assert_close, checkpoint, options, prompt
from tests.parity.reference_driver import Driver

FAMILIES = ("llama", "qwen2", "qwen3")
FP8: dict[str, Any] = {"precision": Precision.FP8}
_SAMPLING = Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2)


def reference(folder: Path, *, fp8_activations: bool, **changes: Any) -> Driver:
    with open_checkpoint(folder) as opened:
        chosen = options(folder, threads=1, **(FP8 | changes))
        return Driver(ReferenceEngine(opened, chosen, fp8_activations=fp8_activations))


def more_rows_quantise_activations(load: Load, folder: Path, family: str) -> None:
    checkpoint(folder, family)
    found = Driver(load(options(folder, **FP8)))
    wanted = reference(folder, fp8_activations=True)
    for driver in (found, wanted):
        for slot, length in ((3, 70), (4, 33)):
            driver.start(slot, prompt(length), _SAMPLING)
        driver.prefill(3, 4, chunk=29)
    for slot in (3, 4):
        assert_close(found.prompt_logprobs[slot], wanted.prompt_logprobs[slot])


def one_row_keeps_activations_in_bf16(load: Load, folder: Path, family: str) -> None:
    """A decode step of one row after the other; the reference follows its tokens."""
    checkpoint(folder, family)
    found = Driver(load(options(folder, **FP8)))
    found.start(0, prompt(3), _SAMPLING)
    found.prefill(0)
    found.decode(40)
    forced = reference(folder, fp8_activations=False)
    forced.start(0, [*prompt(3), *found.tokens[0]], Sampling(temperature=0.0, prompt_logprobs=3))
    forced.prefill(0)
    assert_close(found.logprobs[0], forced.prompt_logprobs[0][2:])


def wide_decode_steps(load: Load, folder: Path, family: str) -> None:
    """Twelve slots decode at once; the reference follows the tokens of some."""
    checkpoint(folder, family)
    sizes = {"max_sequences": 12, "max_step_tokens": 96, "kv_pages": 40}
    found = Driver(load(options(folder, **FP8, **sizes)))
    for slot in range(12):
        found.start(slot, prompt(20 + slot), _SAMPLING)
    found.prefill(*range(12), chunk=8)
    found.decode(3)
    for slot in (0, 11):
        forced = reference(folder, fp8_activations=True, **sizes)
        before = 20 + slot
        forced.start(0, [*prompt(before), *found.tokens[slot]], Sampling(temperature=0.0, prompt_logprobs=3))
        forced.prefill(0)
        assert_close(found.logprobs[slot], forced.prompt_logprobs[0][before - 1 :])


SCENARIOS = (more_rows_quantise_activations, one_row_keeps_activations_in_bf16, wide_decode_steps)
