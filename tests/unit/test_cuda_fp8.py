"""The CUDA engine in FP8 against the reference engine, which rounds the same weights and activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.checkpoint import open_checkpoint
from engine.config import AttentionSpec, DenseSpec
from engine.cuda.features import why_not_precision
from engine.cuda.products_fp8 import fp8_rows_in
from engine.interface import Sampling
from engine.options import Precision
from engine.reference import ReferenceEngine
from kernels.tensor import DType, Tensor
from tests.cuda_scenarios import Load, assert_close, checkpoint, options, prompt
from tests.parity.reference_driver import Driver
from tests.unit.cuda_twin import HostLibrary, load_twin

__all__ = ["load_twin"]
FAMILIES = ("llama", "qwen2", "qwen3")
SAMPLING = Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2)
FP8: dict[str, Any] = {"precision": Precision.FP8}


def reference(folder: Path, *, fp8_activations: bool, **changes: Any) -> Driver:
    with open_checkpoint(folder) as opened:
        chosen = options(folder, threads=1, **(FP8 | changes))
        return Driver(ReferenceEngine(opened, chosen, fp8_activations=fp8_activations))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_of_many_rows(tmp_path: Path, load_twin: Load, family: str) -> None:
    checkpoint(tmp_path, family)
    found = Driver(load_twin(options(tmp_path, **FP8)))
    wanted = reference(tmp_path, fp8_activations=True)
    for driver in (found, wanted):
        for slot, length in ((3, 70), (4, 33)):
            driver.start(slot, prompt(length), SAMPLING)
        driver.prefill(3, 4, chunk=29)
    for slot in (3, 4):
        assert_close(found.prompt_logprobs[slot], wanted.prompt_logprobs[slot])


@pytest.mark.parametrize("family", FAMILIES)
def test_few_rows_keep_activations_in_bf16(tmp_path: Path, load_twin: Load, family: str) -> None:
    """One slot, steps of seven tokens: no pass and no step has more than eight rows."""
    checkpoint(tmp_path, family)
    sizes = {"max_sequences": 1, "max_step_tokens": 7, "kv_pages": 2, "max_sequence_length": 128}
    found = Driver(load_twin(options(tmp_path, **FP8, **sizes)))
    wanted = reference(tmp_path, fp8_activations=False, **sizes)
    for driver in (found, wanted):
        driver.start(0, prompt(50), SAMPLING)
        driver.prefill(0, chunk=7)
    assert_close(found.prompt_logprobs[0], wanted.prompt_logprobs[0])
    found.decode(3)
    assert len(found.tokens[0]) == 4


def test_wide_decode_steps(tmp_path: Path, load_twin: Load) -> None:
    """Twelve slots decode at once; the reference follows each one's tokens."""
    checkpoint(tmp_path)
    sizes = {"max_sequences": 12, "max_step_tokens": 96, "kv_pages": 40}
    found = Driver(load_twin(options(tmp_path, **FP8, **sizes)))
    for slot in range(12):
        found.start(slot, prompt(20 + slot), SAMPLING)
    found.prefill(*range(12), chunk=8)
    found.decode(3)
    for slot in (0, 11):
        forced = reference(tmp_path, fp8_activations=True, **sizes)
        before = 20 + slot
        forced.start(0, [*prompt(before), *found.tokens[slot]], Sampling(temperature=0.0, prompt_logprobs=3))
        forced.prefill(0)
        assert_close(found.logprobs[slot], forced.prompt_logprobs[0][before - 1 :])


def test_which_kernels_the_tier_runs(tmp_path: Path, load_twin: Load) -> None:
    HostLibrary.names.clear()
    driver = Driver(load_twin(options(checkpoint(tmp_path), **FP8)))
    driver.start(0, prompt(20))
    driver.prefill(0)
    driver.decode(1)
    names = {name.partition("<")[0] for name in HostLibrary.names}
    assert {"gated_activation_fp8", "quantise_rows", "skinny_product"} <= names


def test_rows_of_e4m3_in_a_bf16_buffer() -> None:
    buffer = Tensor(4096, (3, 32), DType.BF16)
    rows = fp8_rows_in(buffer, 3, 32)
    assert rows.shape == (3, 32)
    assert (rows.values.address, rows.scale.address) == (4096, 4096 + 96)
    assert rows.scale.address + rows.scale.bytes <= buffer.address + buffer.bytes
    with pytest.raises(ValueError, match="3 × 64 elements of e4m3 in a buffer of 192 B"):
        fp8_rows_in(buffer, 3, 64)


@pytest.mark.parametrize("where", ["o", "gate"])
def test_biases_behind_other_products_are_refused(tmp_path: Path, where: str) -> None:
    with open_checkpoint(checkpoint(tmp_path, "qwen2")) as opened:
        config = opened.config
    assert why_not_precision(config, Precision.FP8, (9, 0)) is None
    layer = config.layers[0]
    assert isinstance(layer.mixer, AttentionSpec)
    assert isinstance(layer.feed_forward, DenseSpec)
    if where == "o":
        layer = replace(layer, mixer=replace(layer.mixer, output_bias=True))
    else:
        layer = replace(layer, feed_forward=replace(layer.feed_forward, bias=True))
    config = replace(config, layers=(layer, *config.layers[1:]))
    reason = why_not_precision(config, Precision.FP8, (9, 0))
    assert reason is not None
    assert f".{where}.bias: products in fp8 take biases of q, k and v only" in reason
    assert why_not_precision(config, Precision.BF16, (9, 0)) is None
