"""`slipstream bench plans`: the ways it names are those that programs take; it times programs' own calls."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.config import ModelConfig, expected_tensors
from engine.cuda import product_bench
from engine.cuda.graphs import Eager
from engine.cuda.product_bench import random_checkpoint
from engine.options import EngineOptions, Precision
from engine.plan_report import stated_figures
from engine.product_figures import ROWS, list_products, measure_products
from service.cli.app import app
from tests.cuda_scenarios import checkpoint
from tests.unit.cuda_twin import HostEvent, load_twin

__all__ = ["load_twin"]

PRODUCTS = ("q|k|v", "o", "gate|up", "down", "head")
GPU = stated_figures(2 * 10**9)


def ways(folder: Path, precision: Precision, rows: int) -> dict[str, str]:
    options = EngineOptions(folder, precision=precision, max_sequences=8)
    return {figure.product: figure.arm for figure in list_products(folder, options, GPU, [rows])}


def test_ways_follow_from_the_tier_and_the_rows(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    layers = PRODUCTS[:4]
    assert ways(folder, Precision.Q4, 1) == dict.fromkeys(PRODUCTS, "skinny")
    assert ways(folder, Precision.Q4, 16) == dict.fromkeys(PRODUCTS, "q4 gemm")
    assert ways(folder, Precision.Q4, 8192) == dict.fromkeys(layers, "dequantised")
    assert ways(folder, Precision.FP8, 8192) == dict.fromkeys(layers, "fp8")
    assert ways(folder, Precision.BF16, 8192) == dict.fromkeys(layers, "cublaslt")


def test_every_number_of_rows_of_a_step_is_shown(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    options = EngineOptions(folder, max_step_tokens=512, max_sequences=8)
    figures = list_products(folder, options, GPU)
    shown = {figure.rows for figure in figures if figure.product == "o"}
    assert shown == {rows for rows in ROWS if rows <= 512}
    (gate_up,) = (figure for figure in figures if (figure.product, figure.rows) == ("gate|up", 1))
    assert (gate_up.n, gate_up.k, gate_up.weight_bytes) == (256, 64, 256 * 64 * 2)
    assert gate_up.microseconds is gate_up.teraflops is None


def test_random_checkpoints_have_every_tensor_in_little_memory() -> None:
    config = ModelConfig.from_hf(
        {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
            "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    made = random_checkpoint(config)
    for name, shape in expected_tensors(config).items():
        tensor = made.tensor(name)
        assert tensor.shape == shape
        assert tensor.data.shape == ((1, 2 * shape[0]) if len(shape) == 1 else (shape[0], 2 * shape[1]))
        rows = tensor.data[-2:].copy().view(np.uint16)
        assert np.isfinite((rows.astype(np.uint32) << 16).view(np.float32)).all()
        assert len(shape) == 1 or not np.array_equal(rows[0], rows[1])


class Timed(HostEvent):
    """Two milliseconds pass between any two."""

    def milliseconds_since(self, earlier: HostEvent) -> float:
        return 2.0


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.Q4, Precision.FP8])
def test_times_are_of_the_calls_that_programs_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_twin: Any, precision: Precision
) -> None:
    """On host memory, by the kernels' twins: each product of both layers, once a graph."""
    calls: dict[int, int] = {}

    class Counted(Eager):
        def launch(self) -> None:
            calls[self.nodes] = calls.get(self.nodes, 0) + 1
            super().launch()

    monkeypatch.setattr(product_bench, "Graph", Counted)
    monkeypatch.setattr(product_bench, "Event", Timed)
    copy = SimpleNamespace(cuMemcpyHtoD=lambda to, source, size: (ctypes.memmove(to, source, size) and 0,))
    monkeypatch.setattr(product_bench, "driver", copy)
    folder = checkpoint(tmp_path)
    options = EngineOptions(
        folder, precision=precision, max_sequences=4, max_step_tokens=32, kv_pages=8, max_sequence_length=256
    )
    heard: list[float] = []
    figures = list(measure_products(folder, options, GPU, [1, 32], heard.append))
    assert [figure.product for figure in figures] == [*PRODUCTS, *PRODUCTS]
    assert heard == [0.5, 1.0]
    launches = product_bench._REPLAYS * product_bench._LAUNCHES + 1
    assert sum(calls.values()) == len(figures) * launches
    per_graph = 2000 / product_bench._LAUNCHES
    for figure in figures:
        layers = 1 if figure.product == "head" else 2
        assert figure.microseconds == pytest.approx(per_graph / layers)
        assert figure.teraflops == pytest.approx(
            2e-6 * figure.rows * figure.n * figure.k / figure.microseconds
        )


def test_the_command_shows_ways_without_a_gpu(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    arguments = ["bench", "plans", str(folder), "--device-memory", "2GB", "--precision", "q4", "--rows", "16"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("q4 gemm") == len(PRODUCTS)
    figures = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert [figure["product"] for figure in figures] == list(PRODUCTS)
    assert all(figure["microseconds"] is None for figure in figures)


def test_the_command_refuses_rows_that_no_step_has(tmp_path: Path) -> None:
    arguments = ["bench", "plans", str(checkpoint(tmp_path)), "--device-memory", "2GB", "--rows", "16"]
    refused = CliRunner().invoke(app, [*arguments, "--rows", "65", "--max-step-tokens", "64"])
    assert refused.exit_code == 1
    assert "No step has 65 rows" in refused.output
    assert "1 … 64" in refused.output
