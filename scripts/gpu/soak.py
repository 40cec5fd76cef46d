"""Thousands of requests over many streams, ended in every way there is: nothing may leak, no token go astray.

    PYTHONPATH=. python scripts/gpu/soak.py --engine cuda --model recall --out build/soak
    PYTHONPATH=. python scripts/gpu/soak.py --engine simulated --requests 10000
    PYTHONPATH=. python scripts/gpu/soak.py --target 127.0.0.1:50051

First every subject (a prompt with its own length and sampling) is asked alone. Then the soak: each whole
answer must be the one given alone, each answer cut short its beginning. On the model of recall_model.py
nothing rounds, whatever the precision: that is the sharp test, and first tokens are held against those
foretold. On others rounding depends on how many rows share a step (--rounding, taken for the CUDA engine): an
answer that differs is decoded again with its tokens forced, and each must be among the likeliest it was
chosen from and have the log-probability that was told with it, but for --noise.

Afterwards nothing may run or hold a page, no worker may have been started anew, and memory be where it was
after the first tenth. --model: a path or name as for `slipstream serve`, "tiny", "recall", "recall-tiny",
"recall-SHAPE" or a shape of make_random_checkpoint.py. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from protos.slipstream.v1.inference_pb2 import GetModelInfoRequest
from scripts.benchmark.server import serving
from scripts.gpu.make_random_checkpoint import MODELS, make_random_checkpoint
from scripts.gpu.recall_model import TINY, Recall, make_recall_model
from scripts.gpu.soak_requests import Call, Subject, make_calls, make_subjects
from scripts.gpu.soak_resources import Holdings, when_idle
from scripts.gpu.soak_streams import Received, Widest, ask_alone, carry_out, find_fault, follows, why_wrong
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from service.cli.connection import Connection, control, inference

RECALL = "recall"
"""Begins the names of the models on which every token is foretold."""
FORETOLD = 16
"""Subjects whose first tokens are held against the model's own arithmetic; a tenth of a second each."""
_LOOKERS = 16
"""Answers decoded again at once."""
MOST_TOLD = 20
"""Faults kept word for word."""


@dataclass(slots=True)
class Tally:
    """What has come of the calls so far."""

    endings: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    differing: list[tuple[Call, Received]] = field(default_factory=list)
    """To be looked at again, where rounding may explain it."""
    faults: list[str] = field(default_factory=list)
    widest: Widest = field(default_factory=Widest)

    def add(self, call: Call, request_id: str, received: Received, rounding: bool) -> None:
        self.endings[call.ending.value] += 1
        self.statuses[received.status.name] += 1
        self.tokens += len(received.tokens)
        fault = find_fault(call, request_id, received)
        if fault is None and not follows(call, received):
            if rounding:
                self.differing.append((call, received))
            else:
                fault = _first_difference(received.tokens, call.subject.answer)
        if fault is not None:
            self.faults.append(f"{request_id}: {fault}")


def _first_difference(came: list[int], alone: list[int]) -> str:
    same = zip(came, alone, strict=False)
    index = next((i for i, (one, other) in enumerate(same) if one != other), min(len(came), len(alone)))
    return (
        f"{len(came)} tokens came, {len(alone)} alone; from {index}: {came[index:][:8]}, {alone[index:][:8]}"
    )


def main() -> int:
    options = _options()
    with ExitStack() as stack:
        connection = Connection(target=options.target) if options.target else _serve(stack, options)
        report = asyncio.run(soak(connection, options))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "soak.json").write_text(json.dumps(report, indent=1))
    print(as_table(report))
    return 1 if report["faults"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a running server; otherwise one is started")
    parser.add_argument("--engine", default="simulated")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--subjects", type=int, default=200)
    parser.add_argument("--longest-prompt", type=int, default=1000)
    parser.add_argument("--most-tokens", type=int, default=160)
    parser.add_argument("--fronts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounding", action=argparse.BooleanOptionalAction)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--noise", type=float, default=0.2, help="nats that rounding explains")
    parser.add_argument("--rss-growth-mib", type=float, default=64)
    parser.add_argument("--device-growth-mib", type=float, default=64)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(recall=None)
    return parser.parse_args()


def _serve(stack: ExitStack, options: argparse.Namespace) -> Connection:
    """A server of its own, with a model made for it if need be."""
    model = options.model
    if model == "tiny" or model in MODELS or model.startswith(RECALL):
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=in_memory)))
        if model == "tiny":
            make_tiny_checkpoint(folder, head_dim=64)
        elif model.startswith(RECALL):
            options.recall = make_recall_model(folder, recall_config(model))
        else:
            make_random_checkpoint(folder, model)
        model = str(folder)
    slots = str(options.streams)
    flags = ["--engine", options.engine, "--max-sequences", slots, "--fronts", str(options.fronts)]
    for name in ("precision", "kv_dtype"):
        if (value := getattr(options, name)) != "auto":
            flags += [f"--{name.replace('_', '-')}", value]
    return stack.enter_context(serving(model, *flags))


def recall_config(model: str) -> dict[str, Any]:
    """Of "recall", the smallest real shape, "recall-tiny" or "recall-SHAPE"."""
    shape = model.removeprefix(RECALL).removeprefix("-") or "qwen3-1.7b"
    return TINY if shape == "tiny" else MODELS[shape]


def unforetold(model: Recall, subjects: list[Subject]) -> list[str]:
    """Greedy first tokens, given alone, that are not those the model must give."""
    codes = model.codes()
    greedy = [subject for subject in subjects if subject.top_k == 1][:FORETOLD]
    wanted = [int(model.logits(subject.prompt, codes).argmax()) for subject in greedy]
    return [
        f"{subject.answer[0]} came first after {len(subject.prompt)} tokens, {token} is foretold"
        for subject, token in zip(greedy, wanted, strict=True)
        if subject.answer[0] != token
    ]


async def soak(connection: Connection, options: argparse.Namespace) -> dict[str, Any]:
    """The report, as JSON has it; "faults" is empty if all held."""
    async with connection.open_async() as channel:
        stub, metadata = inference(channel), connection.metadata()
        info = await stub.GetModelInfo(GetModelInfoRequest(), metadata=metadata)
        rounding = info.engine == "cuda" and options.recall is None
        rounding = rounding if options.rounding is None else options.rounding
        subjects = make_subjects(
            info, options.subjects, options.seed, options.longest_prompt, options.most_tokens
        )
        began = time.perf_counter()
        for number, subject in enumerate(subjects):
            await ask_alone(stub, connection, subject, f"alone-{number}")
        alone_s = time.perf_counter() - began
        tally = Tally()
        if options.recall is not None and info.engine != "simulated":
            tally.faults += unforetold(options.recall, subjects)
        calls = list(make_calls(subjects, options.requests, options.seed + 1))
        warm = len(calls) // 10
        await _run(stub, connection, calls[:warm], options.streams, tally, rounding)
        before = await when_idle(control(channel), metadata)
        began = time.perf_counter()
        await _run(stub, connection, calls[warm:], options.streams, tally, rounding)
        seconds = time.perf_counter() - began
        after = await when_idle(control(channel), metadata)
        await _look_again(stub, connection, tally, options.noise)
    tally.faults += _leaks(before, after, options)
    return {
        "engine": info.engine,
        "model": info.name,
        "requests": len(calls),
        "streams": options.streams,
        "subjects": len(subjects),
        "alone_s": round(alone_s, 2),
        "soak_s": round(seconds, 2),
        "requests_per_s": round((len(calls) - warm) / seconds, 1),
        "tokens": tally.tokens,
        "endings": dict(tally.endings),
        "statuses": dict(tally.statuses),
        "differing_by_rounding": len(tally.differing),
        "widest": tally.widest.as_json(),
        "before": asdict(before),
        "after": asdict(after),
        "faults": len(tally.faults),
        "first_faults": tally.faults[:MOST_TOLD],
    }


async def _run(
    stub: Any, connection: Connection, calls: list[Call], streams: int, tally: Tally, rounding: bool
) -> None:
    """`streams` clients that take one call after the other."""
    waiting: Iterator[Call] = iter(calls)

    async def client() -> None:
        for call in waiting:
            request_id = f"soak-{call.number}"
            tally.add(call, request_id, await carry_out(stub, connection, call, request_id), rounding)

    await asyncio.gather(*(client() for _ in range(streams)))


async def _look_again(stub: Any, connection: Connection, tally: Tally, noise: float) -> None:
    """Each answer that differs from the one given alone; what begins a sound answer is sound."""
    by_subject: dict[int, list[tuple[Call, Received]]] = {}
    for call, received in tally.differing:
        by_subject.setdefault(id(call.subject), []).append((call, received))

    async def look(group: list[tuple[Call, Received]]) -> None:
        sound: set[tuple[int, ...]] = set()
        for call, received in sorted(group, key=lambda pair: -len(pair[1].tokens)):
            tokens = received.tokens
            if tuple(tokens) in sound and not received.logprobs:
                continue
            reason = await why_wrong(stub, connection, call.subject, received, noise, tally.widest)
            if reason is None:
                sound |= {tuple(tokens[:length]) for length in range(1, len(tokens) + 1)}
            else:
                tally.faults.append(f"soak-{call.number}: {reason}")

    groups = iter(by_subject.values())

    async def client() -> None:
        for group in groups:
            await look(group)

    await asyncio.gather(*(client() for _ in range(_LOOKERS)))


def _leaks(before: Holdings, after: Holdings, options: argparse.Namespace) -> list[str]:
    faults = []
    if not after.is_idle:
        faults.append(f"not idle at the end: {after}")
    if after.restarts:
        faults.append(f"workers were started anew {after.restarts} times")
    for what, most in (("rss_mib", options.rss_growth_mib), ("device_mib", options.device_growth_mib)):
        first, last = getattr(before, what), getattr(after, what)
        if first is not None and last is not None and last - first > most:
            faults.append(f"{what} grew from {first} to {last}")
    return faults


def as_table(report: dict[str, Any]) -> str:
    """Markdown."""
    rows = [
        ("engine, model", f"{report['engine']}, {report['model']}"),
        ("requests, streams, subjects", "{requests:,}, {streams}, {subjects}".format(**report)),
        ("requests/s, tokens in all", "{requests_per_s}, {tokens:,}".format(**report)),
        ("endings", ", ".join(f"{count:,} {name}" for name, count in sorted(report["endings"].items()))),
        ("statuses", ", ".join(f"{count:,} {name}" for name, count in sorted(report["statuses"].items()))),
        ("answers that differ by rounding alone", f"{report['differing_by_rounding']:,}"),
        ("widest of it, nats", ", ".join(f"{name} {value}" for name, value in report["widest"].items())),
    ]
    for name, label in (
        ("pages_in_use", "pages in use"),
        ("rss_mib", "RSS, MiB"),
        ("device_mib", "GPU, MiB"),
    ):
        rows.append(
            (f"{label}: after a tenth, at the end", f"{report['before'][name]}, {report['after'][name]}")
        )
    rows.append(("faults", f"{report['faults']:,}"))
    lines = ["| soak | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join([*lines, *report["first_faults"]])


if __name__ == "__main__":
    sys.exit(main())
