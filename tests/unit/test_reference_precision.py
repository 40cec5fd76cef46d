"""The reference engine in the tiers of few bits: which values it multiplies by, and how it caches KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint import Checkpoint, TensorType, open_checkpoint
from engine.checkpoint.tensor import Tensor
from engine.errors import UnsupportedModelError
from engine.factory import load_engine
from engine.interface import Sampling
from engine.options import EngineOptions, KvDtype, Precision
from engine.quantization import fp8, q4_0
from engine.reference import ReferenceEngine
from engine.reference.holding import Holding
from engine.reference.ops.kv_pages import power_of_two_scales, write_fp8_pages
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from scripts.tiny_gguf import write_gguf
from service.text import load_tokenizer
from tests.parity.reference_driver import Driver

BF16 = ml_dtypes.bfloat16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
PROMPT = list(range(3, 73))
LOGPROBS = Sampling(temperature=0.0, prompt_logprobs=5)


def logprobs(checkpoint: Checkpoint, *, fp8_activations: bool = False, **options: object) -> list[object]:
    """Of the prompt's tokens, with the five most likely."""
    chosen = EngineOptions(
        Path(), "reference", max_sequences=2, kv_pages=8, max_sequence_length=200, threads=1, **options
    )  # type: ignore[arg-type]
    engine = ReferenceEngine(checkpoint, chosen, fp8_activations=fp8_activations)
    driver = Driver(engine)
    driver.start(0, PROMPT, LOGPROBS)
    driver.prefill(0, chunk=33)
    engine.close()
    return list(driver.prompt_logprobs[0])


def with_matrices(
    checkpoint: Checkpoint, change: Callable[[np.ndarray], np.ndarray], *, head: bool
) -> Checkpoint:
    """The same model, its matrices changed and stored in float32, its head apart from the embedding."""

    def changed(name: str) -> Tensor:
        tensor = checkpoint.tensor(name)
        is_matrix = len(tensor.shape) == 2 and (
            name.startswith("layers.") or (head and name == "head.weight")
        )
        values = tensor.to_float32().astype(BF16).astype(np.float32)
        values = change(values) if is_matrix else values
        data = values.reshape(len(tensor.data), -1).view(np.uint8)
        return Tensor(name, TensorType.F32, tensor.shape, data)

    names = dict.fromkeys((*checkpoint.names(), "head.weight"))
    config = replace(checkpoint.config, tied_embeddings=False)
    return Checkpoint(checkpoint.path, config, {name: lambda n=name: changed(n) for name in names}, ())


def through_q4(values: np.ndarray) -> np.ndarray:
    return q4_0.dequantise(q4_0.quantise(values))


def through_fp8(values: np.ndarray) -> np.ndarray:
    return fp8.dequantise_rows(fp8.quantise_rows(values))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("precision", "change", "head"),
    [
        (Precision.BF16, lambda values: values, True),
        (Precision.Q4, through_q4, True),
        (Precision.FP8, through_fp8, False),
    ],
    ids=["bf16", "q4", "fp8"],
)
def test_a_tier_is_the_model_with_its_matrices_rounded(
    tmp_path: Path,
    family: str,
    dtype: str,
    precision: Precision,
    change: Callable[..., np.ndarray],
    head: bool,
) -> None:
    folder = make_tiny_checkpoint(tmp_path, family=family, dtype=dtype, tied=True)
    with open_checkpoint(folder) as checkpoint:
        wanted = logprobs(with_matrices(checkpoint, change, head=head))
        assert logprobs(checkpoint, precision=precision) == wanted
        if precision is not Precision.BF16:
            assert logprobs(checkpoint) != wanted


def test_gguf_q4_0_is_taken_as_it_is(tmp_path: Path) -> None:
    with open_checkpoint(write_gguf(tmp_path / "tiny.gguf", CONFIG, quant="Q4_0")) as checkpoint:
        for name in ("layers.0.feed_forward.down.weight", "head.weight"):
            stored = checkpoint.tensor(name)
            held = Holding(Precision.Q4).matrix(stored)
            np.testing.assert_array_equal(held, stored.to_float32())
            assert not np.array_equal(Holding(Precision.BF16).matrix(stored), held)


def test_published_fp8_is_taken_as_it_is() -> None:
    values = np.random.default_rng(0).standard_normal((16, 32)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full((1, 1), 0.7, np.float32)
    stored = Tensor("layers.0.attention.o.weight", TensorType.F8_E4M3, (16, 32), values.view(np.uint8), scale)
    np.testing.assert_array_equal(Holding(Precision.FP8).matrix(stored), stored.to_float32())
    per_block = replace(stored, scale=np.full((2, 4), 0.7, np.float32), scale_block=(8, 8))
    rounded = per_block.to_float32().astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(Holding(Precision.FP8).matrix(per_block), through_fp8(rounded))


def test_a_matrix_of_broken_blocks_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, hidden=48)
    with open_checkpoint(folder) as checkpoint, pytest.raises(UnsupportedModelError, match="48 columns"):
        logprobs(checkpoint, precision=Precision.Q4)


def test_fp8_activations_change_every_layers_products_but_not_wildly(tiny_checkpoint: Path) -> None:
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        plain = logprobs(checkpoint, precision=Precision.FP8)
        rounded = logprobs(checkpoint, precision=Precision.FP8, fp8_activations=True)
    differences = [abs(one.logprob - other.logprob) for one, other in zip(plain, rounded, strict=True)]
    assert 0 < max(differences) < 0.5


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=20))
def test_scales_are_the_smallest_powers_of_two_that_hold(magnitudes: list[float]) -> None:
    wanted = np.array(magnitudes, np.float32)
    scales = power_of_two_scales(wanted)
    np.testing.assert_array_equal(np.frexp(scales)[0], 0.5)
    assert (wanted <= 448 * scales).all()
    is_least = scales == 2.0**-32
    assert (is_least | (wanted > 448 * (scales / 2))).all()


@given(seed=st.integers(0, 1000), growth=st.floats(0.1, 100))
def test_fp8_pages_hold_what_a_page_wide_scale_can(seed: int, growth: float) -> None:
    """Rows come in several writes, ever larger or smaller; a page begun anew forgets its old scale."""
    rng = np.random.default_rng(seed)
    pages, scales = np.zeros((3, 2, 64, 8), np.float32), np.ones((3, 2), np.float32)
    write_fp8_pages(np.full((1, 2, 8), 1e6, np.float32), pages, scales, np.array([1]), np.array([0]))
    rows = rng.standard_normal((90, 2, 8)).astype(np.float32)
    rows *= (growth ** (np.arange(90) / 30)).astype(np.float32)[:, None, None]
    positions = np.arange(90)
    cuts = [0, *sorted(rng.choice(np.arange(1, 90), 4, replace=False).tolist()), 90]
    table = np.array([1, 2])
    for start, stop in pairwise(cuts):
        span = slice(start, stop)
        write_fp8_pages(rows[span], pages, scales, table[positions[span] // 64], positions[span] % 64)
    for page, first in ((1, 0), (2, 64)):
        written = rows[first : first + 64].swapaxes(0, 1)
        np.testing.assert_array_equal(scales[page], power_of_two_scales(np.abs(written).max(axis=(1, 2))))
        held = pages[page][:, : written.shape[1]]
        # Half a unit of e4m3's last place, of the value or of the smallest normal one under the scale; twice
        # where a raised scale rounded a subnormal again.
        step = np.maximum(np.abs(written), scales[page][:, None, None] * 2.0**-6) * 2.0**-4
        assert (np.abs(held - written) <= 2 * step).all()
        np.testing.assert_array_equal(pages[page][:, written.shape[1] :], 0)


@pytest.mark.parametrize("kv_dtype", [KvDtype.BF16, KvDtype.FP8])
def test_a_rounded_cache_stays_near_the_exact_one(tiny_checkpoint: Path, kv_dtype: KvDtype) -> None:
    with open_checkpoint(tiny_checkpoint) as checkpoint:
        exact, rounded = logprobs(checkpoint), logprobs(checkpoint, kv_dtype=kv_dtype)
    differences = [abs(one.logprob - other.logprob) for one, other in zip(exact, rounded, strict=True)]
    assert 0 < max(differences) < (0.02 if kv_dtype is KvDtype.BF16 else 0.3)


TEXT = (
    "The lighthouse stood at the end of a long stone pier. Every evening, when the sun went down behind the "
    "hills, the keeper climbed the narrow stairs and lit the great lamp, so that the fishing boats could "
    "find their way home. In winter the waves broke over the wall and the wind shook the windows, but the "
    "light never failed. People in the village said that as long as it burned, nobody who had gone out to "
    "sea would be lost. One morning a young woman came to the door and asked whether she could see the lamp."
)


def perplexity(model: Path, tokens: list[int], **options: object) -> tuple[float, object]:
    engine = load_engine(
        EngineOptions(model, "reference", max_sequences=1, max_sequence_length=512, threads=1, **options)  # type: ignore[arg-type]
    )
    driver = Driver(engine)
    driver.start(0, tokens, Sampling(temperature=0.0, prompt_logprobs=0))
    driver.prefill(0)
    engine.close()
    values = [entry.logprob for entry in driver.prompt_logprobs[0]]
    return float(np.exp(-np.mean(values))), engine.info


def test_perplexity_of_the_demo_model(demo_model: Path) -> None:
    tokens = list(load_tokenizer(demo_model).encode(TEXT))
    plain, _ = perplexity(demo_model, tokens)
    assert 3 < plain < 30
    quantised, info = perplexity(demo_model, tokens, precision=Precision.FP8, kv_dtype=KvDtype.FP8)
    assert quantised == pytest.approx(plain, rel=0.03)
    assert (info.weight_dtype, info.kv_dtype) == ("fp8", "fp8")  # type: ignore[attr-defined]
    assert any("bf16" in note for note in info.fallbacks)  # type: ignore[attr-defined]
    quantised, info = perplexity(demo_model, tokens, precision=Precision.Q4)
    assert plain < quantised < 1.5 * plain
    assert info.weight_dtype == "q4"  # type: ignore[attr-defined]
