"""The FP8 tier of the CUDA engine on host memory, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.checkpoint import open_checkpoint
from engine.config import AttentionSpec, DenseSpec
from engine.cuda.features import why_not_precision
from engine.cuda.products_fp8 import fp8_rows_in
from engine.interface import Sampling
from engine.options import Precision
from kernels.tensor import DType, Tensor
from tests.cuda_scenarios import Load, assert_close, checkpoint, options, prompt
from tests.fp8_scenarios import FAMILIES, FP8, SCENARIOS, reference
from tests.parity.reference_driver import Driver
from tests.unit.cuda_twin import SETTINGS, HostLibrary, load_twin

__all__ = ["load_twin"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(tmp_path: Path, load_twin: Load, scenario: object, family: str) -> None:
    scenario(load_twin, tmp_path, family)  # type: ignore[operator]


def test_which_kernels_the_tier_runs(tmp_path: Path, load_twin: Load) -> None:
    HostLibrary.names.clear()
    driver = Driver(load_twin(options(checkpoint(tmp_path), **FP8)))
    driver.start(0, prompt(20))
    driver.prefill(0)
    driver.decode(1)
    names = {name.partition("<")[0] for name in HostLibrary.names}
    assert {"gated_activation_fp8", "skinny_product"} <= names


def test_a_row_of_a_model_whose_hidden_size_the_kernels_for_few_rows_cannot_take(
    tmp_path: Path, load_twin: Load
) -> None:
    """48 is no multiple of 32: q|k|v and gate|up quantise their input, o and down do not."""
    checkpoint(tmp_path, hidden=48, intermediate=128)
    sizes = {"max_sequences": 1, "max_step_tokens": 1, "kv_pages": 2, "max_sequence_length": 128}
    HostLibrary.names.clear()
    settings = replace(SETTINGS, prefill_sizes=(1,))
    found = Driver(load_twin(options(tmp_path, **FP8, **sizes), settings))  # type: ignore[call-arg]
    wanted = reference(tmp_path, fp8_activations=True, **sizes)
    for driver in (found, wanted):
        driver.start(0, prompt(50), Sampling(temperature=0.0, prompt_logprobs=2))
        driver.prefill(0, chunk=1)
    assert_close(found.prompt_logprobs[0], wanted.prompt_logprobs[0])
    names = {name.partition("<")[0] for name in HostLibrary.names}
    assert {"gated_activation", "skinny_product"} <= names
    assert "gated_activation_fp8" not in names


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
