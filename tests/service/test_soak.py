"""The soak script: a few hundred requests leave nothing behind, and a wrong token does not go unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from protos.slipstream.v1.inference_pb2 import FinishReason, GetModelInfoResponse
from scripts.gpu.soak import Tally
from scripts.gpu.soak_requests import Call, Ending, make_calls, make_subjects
from scripts.gpu.soak_streams import Received
from tests.service.server_process import ROOT, environment

INFO = GetModelInfoResponse(vocab_size=320, max_sequence_length=512)


def test_a_short_soak_of_a_served_model_finds_nothing(tmp_path: Path, tiny_checkpoint: Path) -> None:
    command = [
        sys.executable,
        "scripts/gpu/soak.py",
        "--engine",
        "simulated",
        "--model",
        str(tiny_checkpoint),
    ]
    command += ["--requests", "400", "--subjects", "40", "--fronts", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["first_faults"] == []
    assert sum(report["endings"].values()) == 400
    assert set(report["endings"]) == {ending.value for ending in Ending}
    assert report["after"]["pages_in_use"] == 0


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
