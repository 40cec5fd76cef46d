"""What `slipstream plan` foretells is what the CUDA engine then takes, here on host memory."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine import plan_report
from engine.cuda import planning
from engine.cuda.work import SampleKey
from engine.errors import ModelError
from engine.options import EngineOptions, KvDtype, Precision
from engine.plan_report import DeviceFigures, PlanReport, plan_model, plan_outlooks, stated_figures
from scripts.tiny_gguf import write_gguf
from service.cli.app import app
from service.cli.plan import PlannedOptions, parse_size
from tests.cuda_scenarios import checkpoint, options
from tests.unit.cuda_twin import HOPPER, SETTINGS, HostDevice, load_twin
from tests.weight_tiers import GGUF_CONFIG, publish_fp8

__all__ = ["load_twin"]

TWIN = DeviceFigures(HostDevice.name, HOPPER, HostDevice.total_bytes, HostDevice.total_bytes)
TIERS = [(precision, kv) for precision in list(Precision)[1:] for kv in list(KvDtype)[1:]]


@pytest.mark.parametrize(("precision", "kv_dtype"), TIERS)
@pytest.mark.parametrize("kv_pages", [None, 24])
def test_the_server_allocates_exactly_what_was_planned(
    tmp_path: Path, load_twin: Any, precision: Precision, kv_dtype: KvDtype, kv_pages: int | None
) -> None:
    chosen = options(
        checkpoint(tmp_path), precision=precision, kv_dtype=kv_dtype, kv_pages=kv_pages, memory_fraction=0.2
    )
    planned = plan_model(tmp_path, chosen, TWIN)
    engine = load_twin(chosen)
    assert engine.info.memory_plan == planned.bytes_by_purpose
    assert planned.planned_bytes == sum(planned.bytes_by_purpose.values())
    assert engine.parts.arena.bytes == planned.planned_bytes - planned.bytes_by_purpose["graphs"]
    assert (engine.capacity.pages, engine.capacity.slots) == (planned.kv_pages, planned.max_sequences)
    assert engine.capacity.max_sequence_length == planned.max_sequence_length
    assert (engine.info.weight_dtype, engine.info.kv_dtype) == (precision, kv_dtype)
    assert set(planned.notes) <= set(engine.info.fallbacks)
    if kv_pages is None:
        assert 0 <= planned.budget_bytes - planned.planned_bytes < 2 * planned.kv_bytes_per_token * 64


def report(path: Path, **changes: Any) -> PlanReport:
    return plan_model(path, EngineOptions(path, **changes), stated_figures(2 * 10**9))


def test_settings_alone_plan_as_the_whole_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    whole, settings = report(folder), report(folder / "config.json")
    assert replace(settings, path=folder) == whole
    (folder / "model.safetensors").unlink()
    assert report(folder) == whole


def test_auto_keeps_what_the_files_have(tmp_path: Path) -> None:
    quantised = write_gguf(tmp_path / "q4.gguf", GGUF_CONFIG, quant="Q4_0")
    finer = write_gguf(tmp_path / "q6.gguf", GGUF_CONFIG, quant="Q6_K")
    assert report(quantised).precision is Precision.Q4
    assert report(finer).precision is Precision.BF16
    assert report(publish_fp8(tmp_path / "row", "row", head_dim=64)).precision is Precision.FP8
    assert report(publish_fp8(tmp_path / "tensor", "tensor", head_dim=64)).precision is Precision.FP8
    assert report(publish_fp8(tmp_path / "block", "block", head_dim=64)).precision is Precision.BF16
    assert report(quantised, precision=Precision.BF16).precision is Precision.BF16


def test_an_old_gpu_runs_published_fp8_in_bf16_and_says_so(tmp_path: Path) -> None:
    folder = publish_fp8(tmp_path, "row", head_dim=64)
    ampere = replace(TWIN, limits=replace(HOPPER, compute_capability=(8, 6)))
    plan = plan_model(folder, EngineOptions(folder), ampere)
    assert plan.precision is Precision.BF16
    assert "compute capability 8.9, the GPU has 8.6" in plan.notes[0]
    for changes in ({"precision": Precision.FP8}, {"kv_dtype": KvDtype.FP8}):
        with pytest.raises(ModelError, match=r"8\.9, the GPU has 8\.6"):
            plan_model(folder, EngineOptions(folder, **changes), ampere)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "precision", "message"),
    [
        (
            {"hidden": 48},
            Precision.Q4,
            r"attention\.q\.weight is 256 × 48, and q4 holds .* 32",
        ),
        ({"intermediate": 72}, Precision.FP8, r"feed_forward\.gate\.weight is 72 × 64, and fp8 holds .* 16"),
        ({"vocab_size": 328}, Precision.Q4, r"head\.weight is 328 × 64, and q4 holds .* 16 rows"),
        ({"vocab_size": 328, "tied": True}, Precision.Q4, r"embedding\.weight is 328 × 64"),
    ],
)
def test_matrices_that_do_not_fit_a_tier_are_refused_by_name(
    tmp_path: Path, sizes: dict[str, Any], precision: Precision, message: str
) -> None:
    folder = checkpoint(tmp_path, **sizes)
    with pytest.raises(ModelError, match=message):
        report(folder, precision=precision)
    assert report(folder).precision is Precision.BF16


def test_the_largest_batch_is_the_largest(tmp_path: Path) -> None:
    """One sequence more, and the server refuses to start."""
    folder = checkpoint(tmp_path, max_length=6000)
    small = stated_figures(1_600_000_000)
    plan = plan_model(folder, EngineOptions(folder), small)
    chosen = next(one for one in plan.outlooks if (one.precision, one.kv_dtype) == ("bf16", "bf16"))
    for batch, length in ((chosen.batch_usual, plan_report.USUAL_CONTEXT), (chosen.batch_full, 6000)):
        assert 1 < batch < 1024
        pages = -(-length // 64)
        wanted = EngineOptions(
            folder, max_sequences=batch, max_sequence_length=length, kv_pages=batch * pages
        )
        plan_model(folder, wanted, small)
        more = replace(wanted, max_sequences=batch + 1, kv_pages=(batch + 1) * pages)
        with pytest.raises(ModelError, match="does not fit"):
            plan_model(folder, more, small)


def test_what_does_not_fit_says_what_to_lower(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, hidden=512, layers=8, vocab_size=20000)
    size = planning.RESERVE_BYTES + plan_report.CONTEXT_BYTES + 400_000_000
    tight = stated_figures(int(size / 0.9))
    with pytest.raises(ModelError, match=r"largest part first: lower max_step_tokens.*lower precision"):
        plan_model(folder, EngineOptions(folder, max_step_tokens=60_000), tight)
    outlooks = plan_outlooks(folder, EngineOptions(folder, max_step_tokens=60_000), tight)
    assert all("does not fit" in (one.refusal or "") for one in outlooks)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_command_prints_tables_and_json(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    shown = run(folder, "--device-memory", "2GB", "--precision", "q4", "--max-seqs", 8, "--max-len", 512)
    assert shown.exit_code == 0, shown.output
    for part in (
        "weights: embedding",
        "weights: head",
        "staging",
        "kv pages",
        "in all",
        "sequences of 2,048",
    ):
        assert part in shown.output
    arguments = (folder / "config.json", "--device-memory", "2GB", "--gpu-memory", 0.8, "--json")
    figures = json.loads(run(*arguments).output)
    assert figures["budget_bytes"] == int(2 * 10**9 * 0.8) - plan_report.CONTEXT_BYTES
    assert figures["planned_bytes"] == sum(part["bytes"] for part in figures["parts"])
    assert len(figures["outlooks"]) == 6


def test_the_command_refuses_with_advice(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, hidden=1024, layers=8, vocab_size=30000)
    small = EngineOptions(folder, precision=Precision.Q4, max_step_tokens=512, max_sequences=2, kv_pages=9)
    fitting = plan_model(folder, small, stated_figures(8 * 10**9)).planned_bytes
    size = int((fitting + plan_report.CONTEXT_BYTES) / 0.9)
    refused = run(folder, "--device-memory", size, "--max-step-tokens", 512, "--max-seqs", 2)
    assert refused.exit_code == 1
    assert "It would fit with --precision q4" in refused.output
    assert run(folder, "--gpu", 0, "--device-memory", "1GB").exit_code == 2
    assert run(folder, "--device-memory", "much").exit_code == 2
    assert run(folder, "--device-memory", "1GB", "--gpu-memory", 1.5).exit_code == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("141GB", 141 * 10**9),
        ("80GiB", 80 << 30),
        ("24e9", 24 * 10**9),
        ("1.5 g", 1_500_000_000),
        ("512MiB", 512 << 20),
        ("1TiB", 1 << 40),
        ("80GIB", 80 << 30),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "141", "-1", "1e400GB", "1e3000", "nan", "12,5GB", "9999999TB"])
def test_sizes_that_no_gpu_has_are_refused(text: str) -> None:
    refused = CliRunner().invoke(app, ["plan", "none", "--device-memory", text])
    assert refused.exit_code == 2
    assert "--device-memory" in refused.output


@pytest.mark.parametrize(
    "flag", ["--max-seqs", "--max-len", "--max-step-tokens", "--kv-pages", "--gpu-memory"]
)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_options_that_hold_nothing_are_refused_by_name(flag: str, value: str) -> None:
    refused = run("none", "--device-memory", "2GB", flag, value)
    assert refused.exit_code == 2
    assert "error: --" in refused.output


def test_serve_takes_every_flag_by_every_name_that_plan_has_for_it() -> None:
    commands = {
        command.name: {option.name: set(option.opts) for option in command.params}
        for command in get_command(app).commands.values()
    }
    shared = {item.name for item in fields(PlannedOptions)}
    assert {name: commands["serve"][name] for name in shared} == {
        name: commands["plan"][name] for name in shared
    }


def test_the_allowance_covers_every_graph_that_a_width_may_have(tmp_path: Path) -> None:
    """However many switches a key of decode graphs has."""
    switches = [item for item in fields(SampleKey) if item.type in (bool, "bool")]
    assert 2 ** len(switches) == planning._WIDTH_GRAPHS


def test_no_graph_has_more_nodes_than_are_allowed_for(tmp_path: Path, load_twin: Any) -> None:
    folder = checkpoint(tmp_path, layers=3, family="qwen2")
    per_graph = 3 * planning._LAYER_NODES + planning._OTHER_NODES
    for precision in (Precision.BF16, Precision.Q4, Precision.FP8):
        engine = load_twin(
            options(folder, precision=precision, max_step_tokens=1024), replace(SETTINGS, capture=True)
        )
        programs = engine.parts.programs
        made = [run for runs in (programs.decode, programs.prefill) for run in runs._made.values()]
        assert made
        assert max(run.nodes for run in made) <= per_graph
