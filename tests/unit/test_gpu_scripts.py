"""The scripts for machines with a GPU, as far as they run without one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.factory import load_engine
from engine.interface import Engine
from engine.options import EngineOptions
from scripts.benchmark import gpu
from scripts.benchmark.figures import Figure
from scripts.benchmark.gpu_bounds import Rates, Shape, Tier
from scripts.benchmark.server import serving
from scripts.benchmark.steady import Run, Watched, watch
from scripts.gpu import check_all, check_smollm2
from scripts.gpu.make_random_checkpoint import MODELS
from tests.cuda_scenarios import Load, checkpoint, options, reference
from tests.unit.cuda_twin import load_twin

__all__ = ["load_twin"]

PROMPTS = ([5, 9, 200, 31], [7, 7, 300])
TOKENS = 6


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    engine = load_engine(
        EngineOptions(tiny_checkpoint, engine="reference", max_sequences=2, max_sequence_length=64, threads=1)
    )
    yield engine
    engine.close()


def test_an_answer_holds_that_equals_and_one_does_not_that_no_rounding_explains(engine: Engine) -> None:
    right, other = check_smollm2.decode(engine, PROMPTS, TOKENS)
    wrong = [*other[:3], (other[3] + 1) % 300, *other[4:]]
    cases = [
        {"prompt": prompt, "tokens": tokens, "smallest_margin": 0.0}
        for prompt, tokens in zip(PROMPTS, (right, wrong), strict=True)
    ]
    report = check_smollm2.check(engine, cases, noise=1e-3)
    first, second = report["prompts"]
    assert (first["agreeing"], first["holds"], first["widest_gap"]) == (TOKENS, True, 0.0)
    assert (second["agreeing"], second["holds"]) == (3, False)
    assert second["widest_gap"] > 1e-3
    assert (report["equal"], report["holds"]) == (1, False)
    assert check_smollm2.check(engine, cases, noise=100.0)["holds"]
    assert "**wrong**" in check_smollm2.as_table(report)


def test_the_cuda_engine_gives_the_answers_of_the_reference(load_twin: Load, tmp_path: Path) -> None:
    """Its own code, with numpy for kernels: bf16 weights and cache part nothing by more than a little."""
    sizes = {"max_sequences": 2, "max_step_tokens": 64, "kv_pages": 8, "max_sequence_length": 64}
    exact = reference(checkpoint(tmp_path), **sizes).engine
    cases = [
        {"prompt": prompt, "tokens": tokens, "smallest_margin": 0.0}
        for prompt, tokens in zip(PROMPTS, check_smollm2.decode(exact, PROMPTS, TOKENS), strict=True)
    ]
    report = check_smollm2.check(load_twin(options(tmp_path, **sizes)), cases, noise=0.05)
    assert report["engine"] == "cuda"
    assert report["holds"], report


def test_pieces_of_a_model_are_joined_in_order(tmp_path: Path) -> None:
    whole = bytes(range(256)) * 40
    parts = [tmp_path / name for name in ("part.aa", "part.ab", "part.ac")]
    for index, part in enumerate(parts):
        part.write_bytes(whole[index * 4000 : (index + 1) * 4000])
    with ExitStack() as stack:
        joined = check_smollm2.join(list(reversed(parts)), stack)
        assert joined.read_bytes() == whole
    assert not joined.exists()


CARD = Rates(bandwidth=4.26e12, bf16=790e12, fp8=1380e12)


@pytest.mark.parametrize(
    ("model", "tier", "decode", "prefill", "first_ms"),
    [
        ("qwen3-1.7b", Tier(), 1_240, None, None),
        ("qwen3-8b", Tier(), 282, 54_500, 38),
        ("qwen3-1.7b", Tier("q4"), 4_400, None, None),
        ("llama-3.1-8b", Tier("q4"), 1_008, None, None),
        ("qwen3-8b", Tier("fp8"), None, 92_000, None),
    ],
)
def test_limits_are_those_worked_out_by_hand(
    model: str, tier: Tier, decode: float | None, prefill: float | None, first_ms: float | None
) -> None:
    """Attention and cache make up the few percent between."""
    shape = Shape.of(MODELS[model])
    alone = shape.decode_limit(1, 0, CARD.bandwidth, tier)
    if decode is not None:
        assert alone == pytest.approx(decode, rel=0.02)
    assert shape.decode_limit(64, 256, CARD.bandwidth, tier) < 64 * alone
    if prefill is not None:
        assert shape.prefill_limit(2048, CARD, tier) == pytest.approx(prefill, rel=0.03)
    if first_ms is not None:
        assert 1e3 * shape.prefill_seconds(2048, CARD, tier) == pytest.approx(first_ms, rel=0.03)


def test_a_cache_in_fp8_halves_what_long_contexts_read() -> None:
    shape = Shape.of(MODELS["qwen3-8b"])
    rates = [shape.decode_limit(64, 1e7, CARD.bandwidth, Tier("bf16", kv)) for kv in ("bf16", "fp8")]
    assert rates[1] / rates[0] == pytest.approx(2, rel=1e-3)


ENGINE_FIGURES = [
    Figure("copy", "TB/s", (4.2, 4.26, 4.3)),
    Figure("bf16 product 8,192³", "TFLOP/s", (790.0,)),
    Figure("fp8 product 8,192³", "TFLOP/s", (1380.0,)),
    Figure("qwen3-8b bf16 decode ×64", "tok/s", (11_000.0,), at_least=10_500, note="context 128 → 384"),
    Figure("qwen3-8b bf16 ×64 whole, 128 + 256 tokens", "tok/s", (10_000.0,)),
    Figure("qwen3-8b bf16 first token of 2,048", "ms", (50.0,), at_most=48),
    Figure("qwen3-8b fp8, KV fp8 decode ×64 at context 8,192", "tok/s", (5_000.0,)),
]


def fake_script(script: str, *flags: str, name: str = "figures") -> dict[str, Any]:
    if script == "bench_transformers":
        raise RuntimeError("bench_transformers ended with 1 and wrote no figures")
    return {
        "figures": [figure.as_json() for figure in ENGINE_FIGURES],
        "details": {"machine": {"card": "a card"}},
        "failures": {},
    }


def a_run() -> Run:
    """Two streams, a token every 0.1 s: 8 tokens each, the second begins 0.3 s later."""
    times = [[start + 0.1 * index for index in range(8)] for start in (1.0, 1.3)]
    return Run(started=0.9, streams=[Watched(at, [1] * 8) for at in times])


def test_the_steady_window_holds_neither_ramp_nor_end() -> None:
    run = a_run()
    assert run.whole_rate() == pytest.approx(16 / 1.1)
    assert run.steady_rate() == pytest.approx(20)
    apart = Run(0.0, [Watched([1.0, 1.1], [1, 1]), Watched([1.2, 1.3], [1, 1])])
    with pytest.raises(ValueError, match="no steady window"):
        apart.steady_rate()


def test_one_run_puts_limits_beside_the_figures_and_outlives_a_part_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grpc(report: gpu.GpuReport, options: gpu.Options, model: str, tier: Tier, folder: Path) -> None:
        report.figures += gpu.grpc_figures(report, f"{model} {tier.name}", [a_run()], [51.5])

    monkeypatch.setattr(gpu, "_script", fake_script)
    monkeypatch.setattr(gpu, "through_grpc", grpc)
    monkeypatch.setattr(gpu, "make_checkpoint", lambda folder, model: None)
    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    saved: list[int] = []
    report = gpu.run(gpu.Options(["qwen3-8b"]), lambda so_far: saved.append(len(so_far.figures)))
    assert saved == [0, 7, 13, 13]
    decode = report.find("qwen3-8b bf16 decode ×64")
    assert decode is not None
    assert decode.at_least == 10_500
    assert "context 128 → 384; limit by the ceilings" in decode.note
    far = report.find("qwen3-8b fp8, KV fp8 decode ×64 at context 8,192")
    assert far is not None
    assert "limit by the ceilings" in far.note
    share = report.find("qwen3-8b bf16 through gRPC against in-process decode ×64")
    over = report.find("qwen3-8b bf16 first token through gRPC, over in-process")
    assert share is not None
    assert over is not None
    assert (share.median, share.holds) == (pytest.approx(100 * 20 / 11_000), False)
    assert (over.median, over.holds) == (1.5, True)
    assert list(report.failures) == ["qwen3-8b transformers"]


def test_a_client_sees_every_token_with_its_time(tiny_checkpoint: Path) -> None:
    """Of the simulated engine, a millisecond a step."""
    flags = ("--engine", "simulated", "--simulated-step-us", "1000", "--fronts", "1")
    with serving(str(tiny_checkpoint), *flags) as connection:
        run = watch(connection, streams=4, prompt_tokens=8, tokens=40, seed=1)
    assert [stream.tokens for stream in run.streams] == [40] * 4
    assert run.whole_rate() < 4000
    assert 1000 < run.steady_rate() < 4400


def test_a_machine_without_a_gpu_skips_the_part_and_says_why(tmp_path: Path) -> None:
    reason = gpu.why_not()
    if reason is None:
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, str(gpu.ROOT / "scripts" / "bench"), "gpu", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"skipped: {reason}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); "
    step = check_all.Step("slow", (sys.executable, "-c", child + "time.sleep(600)"), 2, 0)
    outcome = check_all.run(step, tmp_path, time.monotonic() + 60)
    assert outcome.state == "cut"
    pid = int((tmp_path / "slow.log").read_text().split()[0])
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """A zombie whose parent is gone is over, though nobody may have asked yet."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_steps_pass_fail_or_are_left_out(tmp_path: Path) -> None:
    end = time.monotonic() + 60
    for code, state in ((0, "passed"), (3, "failed")):
        step = check_all.Step("step", (sys.executable, "-c", f"raise SystemExit({code})"), 30, 0)
        assert check_all.run(step, tmp_path, end).state == state
    step = check_all.Step("long", ("never-run",), 900, 300)
    assert check_all.run(step, tmp_path, end).state == "left out"
