"""The engine's measurements run on the host twin: their figures mean nothing here, but they come."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.cuda.engine import CudaEngine
from engine.cuda.settings import CudaSettings
from engine.options import EngineOptions, KvDtype, Precision
from scripts.benchmark.gpu_bounds import Tier
from scripts.gpu import bench_engine, bench_streams
from tests.cuda_scenarios import Load, checkpoint
from tests.unit.cuda_twin import load_twin

__all__ = ["load_twin"]

SETTINGS = CudaSettings(
    tune=False, capture=False, kernel_folder=None, gemm_folder=None, decode_widths=(1, 4), prefill_sizes=(64,)
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that numpy gets through in a second."""
    monkeypatch.setattr(bench_engine, "STEPS", 6)
    monkeypatch.setattr(bench_engine, "CONTEXTS", (70,))
    monkeypatch.setattr(bench_engine, "LONGEST", 128)
    monkeypatch.setattr(bench_engine, "ROWS", 4)
    monkeypatch.setattr(bench_engine, "SERVED", (4, 16, 5))
    monkeypatch.setattr(bench_engine, "CHUNK", 16)
    monkeypatch.setattr(bench_engine, "START", 20)


def loading(load_twin: Load) -> object:
    def load(folder: Path, tier: Tier, settings: CudaSettings, step_tokens: int = 64) -> CudaEngine:
        options = EngineOptions(
            folder, max_sequences=8, max_step_tokens=64, kv_pages=64, max_sequence_length=128,
            precision=Precision(tier.precision), kv_dtype=KvDtype(tier.kv_dtype),
        )  # fmt: skip
        return load_twin(options, SETTINGS)  # type: ignore[call-arg]

    return load


@pytest.mark.parametrize("tier", [(), ("--precision", "fp8")], ids=["bf16", "fp8"])
def test_every_part_yields_its_figures(
    tmp_path: Path, load_twin: Load, monkeypatch: pytest.MonkeyPatch, small: None, tier: tuple[str, ...]
) -> None:
    monkeypatch.setattr(bench_engine, "load", loading(load_twin))
    monkeypatch.setattr(bench_engine, "fill_pages", lambda engine: None)
    (tmp_path / "models" / "qwen3-1.7b").mkdir(parents=True)
    checkpoint(tmp_path / "models" / "qwen3-1.7b")
    flags = ["--out", str(tmp_path), "--models", "qwen3-1.7b", "--checkpoints", str(tmp_path / "models")]
    flags += ["--parts", "decode", "prefill", "serving", "contexts", "startup", "--widths", "1", "4"]
    monkeypatch.setattr("sys.argv", ["bench_engine.py", *flags, *tier, "--step-tokens", "64", "--quick"])
    assert bench_engine.main() == 0
    document = json.loads((tmp_path / "engine.json").read_text())
    assert document["failures"] == {}
    name = f"qwen3-1.7b {tier[-1] if tier else 'bf16'}"
    assert [figure["name"] for figure in document["figures"]] == [
        f"{name} decode ×1", f"{name} idle between steps ×1", f"{name} decode ×4",
        f"{name} idle between steps ×4", f"{name} prefill 8 × 2,048", f"{name} first token of 2,048",
        f"{name} ×4 whole, 16 + 5 tokens", f"{name} decode ×4 at context 70", f"{name} start to ready",
    ]  # fmt: skip
    assert document["figures"][0]["at_least"] == (None if tier else 800)


def test_a_tier_that_has_had_its_time_begins_no_more_parts(tmp_path: Path) -> None:
    options = bench_engine.parse(["--out", str(tmp_path), "--seconds", "0"])
    bench = bench_engine.Bench(options)
    bench.begin("qwen3-8b", Tier("q4"))
    bench.part("decode", lambda: pytest.fail("it ran"))
    assert bench.failures == {"qwen3-8b q4 decode": "left out after 0 s"}


def test_streams_count_all_tokens_and_prefill_whole_prompts(tmp_path: Path, load_twin: Load) -> None:
    engine = loading(load_twin)(checkpoint(tmp_path), Tier(), SETTINGS)  # type: ignore[operator]
    prompts = bench_streams.random_tokens(engine, (4, 20), seed=2)
    streams = bench_streams.Streams(engine, 4, 20, 64, bench_streams.GREEDY, prompts)
    streams.decode(9)
    assert streams.tokens == 40
    assert prompts.dtype == np.int32
