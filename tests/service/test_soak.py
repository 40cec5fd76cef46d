"""The soak script: a few hundred requests leave nothing behind, and a wrong token does not go unseen."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.slipstream.v1.inference_pb2 import (
    CompleteResponse,
    FinishReason,
    GetModelInfoResponse,
    Logprob,
    TokenLogprobs,
)
from scripts.gpu.soak import Tally
from scripts.gpu.soak_requests import Call, Ending, make_calls, make_subjects
from scripts.gpu.soak_streams import Received, Widest, why_wrong
from service.cli.connection import Connection
from tests.service.server_process import ROOT, environment

INFO = GetModelInfoResponse(vocab_size=320, max_sequence_length=512)


def soak(out: Path, *flags: str) -> dict[str, Any]:
    """Runs the script; its report. It must find nothing."""
    command = [sys.executable, "scripts/gpu/soak.py", "--fronts", "1", "--out", str(out), *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((out / "soak.json").read_text())
    assert report["first_faults"] == []
    assert report["after"]["pages_in_use"] == 0
    return report


def test_a_short_soak_of_a_served_model_finds_nothing(tmp_path: Path, tiny_checkpoint: Path) -> None:
    flags = ("--engine", "simulated", "--model", str(tiny_checkpoint))
    report = soak(tmp_path, *flags, "--requests", "400", "--subjects", "40")
    assert sum(report["endings"].values()) == 400
    assert set(report["endings"]) == {ending.value for ending in Ending}


def test_a_model_whose_tokens_are_foretold_gives_them_in_company_too(tmp_path: Path) -> None:
    sizes = ("--longest-prompt", "150", "--most-tokens", "24", "--streams", "8")
    flags = ("--engine", "reference", "--model", "recall-tiny", *sizes)
    report = soak(tmp_path, *flags, "--requests", "100", "--subjects", "32")
    assert report["differing_by_rounding"] == 0


def whole_call() -> tuple[Call, Received]:
    """A greedy call of some length that ended well."""
    subjects = make_subjects(INFO, 16, seed=0, longest_prompt=100, most_tokens=40)
    subject = next(s for s in subjects if s.top_k == 1 and s.sampling.max_tokens > 2)
    subject.answer = list(range(3, 3 + subject.sampling.max_tokens))
    call = Call(0, subject, Ending.WHOLE, 0, 1.0, 0)
    received = Received(tokens=list(subject.answer), finish=FinishReason.FINISH_REASON_LENGTH)
    received.usage, received.request_ids = len(subject.answer), {"soak-0"}
    if subject.sampling.HasField("logprobs"):
        received.logprobs = [-1.0] * len(subject.answer)
    return call, received


@pytest.mark.parametrize("fault", ["none", "token", "short", "foreign", "status", "usage"])
def test_what_is_wrong_with_an_answer_is_seen(fault: str) -> None:
    call, received = whole_call()
    if fault == "token":
        received.tokens[1] += 1
    elif fault == "short":
        received.tokens.pop()
    elif fault == "foreign":
        received.request_ids.add("soak-1")
    elif fault == "status":
        received.status = grpc.StatusCode.INTERNAL
    elif fault == "usage":
        received.usage += 1
    tally = Tally()
    tally.add(call, "soak-0", received, rounding=False)
    assert len(tally.faults) == (fault != "none")


def test_calls_and_subjects_are_the_same_for_the_same_seed() -> None:
    first, second = (make_subjects(INFO, 24, 5, 300, 64) for _ in range(2))
    assert first == second
    assert all(len(s.prompt) + s.sampling.max_tokens < INFO.max_sequence_length for s in first)
    assert list(make_calls(first, 50, 1)) == list(make_calls(second, 50, 1))


class Forced:
    """Stands in for a server: one forced log-probability a token, and those of the likeliest eight."""

    def __init__(self, logprobs: list[float], top: list[float]) -> None:
        self._entries = [_entry(logprob, top) for logprob in logprobs]

    async def Complete(self, request: Any, **_: Any) -> CompleteResponse:  # noqa: N802 - as gRPC names it
        before = len(request.tokens.ids) - len(self._entries) - 1
        return CompleteResponse(prompt_logprobs=[TokenLogprobs()] * before + self._entries)


def _entry(logprob: float, top: list[float]) -> TokenLogprobs:
    return TokenLogprobs(
        token=Logprob(logprob=logprob), rank=17, top=[Logprob(logprob=value) for value in top]
    )


@pytest.mark.parametrize(
    ("kind", "forced", "told", "reason"),
    [
        (1, -2.45, None, None),  # of eight nearly equal ones, whatever its rank
        (1, -2.6, None, "0.200 nats less likely than the last of the 8"),
        (5, -2.3, -2.35, None),
        (5, -2.3, -2.5, "was told -2.500, forced -2.300"),
        (7, -2.6, None, None),  # a penalty may have put it before others
        (7, -3.2, None, "less likely"),
        (0, -2.05, None, None),
        (0, -2.2, None, "0.200 nats less likely than the last of the 1"),
    ],
)
def test_a_token_that_rounding_does_not_explain_is_told(
    kind: int, forced: float, told: float | None, reason: str | None
) -> None:
    subject = make_subjects(INFO, 8, seed=0, longest_prompt=100, most_tokens=40)[kind]
    received = Received(tokens=[50], logprobs=[] if told is None else [told])
    stub = Forced([forced], [-2.0] * (subject.top_k - 1) + [-2.4 if subject.top_k > 1 else -2.0])
    widest = Widest()
    found = asyncio.run(why_wrong(stub, Connection("nowhere:1"), subject, received, 0.1, widest))
    assert found is None if reason is None else reason in str(found)
    assert widest.logprob == pytest.approx(0.0 if told is None else forced - told, abs=1e-6)
