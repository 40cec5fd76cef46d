"""Where a step's time goes: each kind of call of a program, replayed alone over all layers in a graph.

So every call meets weights that come from device memory, as in the whole; what kinds gain or lose by standing
beside each other shows as the difference between their sum and the whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from engine.cuda.device import Event
from engine.cuda.engine import CudaEngine
from engine.cuda.gemm import Gemm
from engine.cuda.graphs import Graph
from engine.cuda.parts import Call
from engine.cuda.program import pass_to_last_attention, whole_pass
from engine.cuda.rows import DecodeRows, PrefillRows
from engine.cuda.sampling import Tail
from engine.cuda.work import SampleKey
from kernels.launch import Launch

_REPLAYS = 9


def profile_decode(engine: CudaEngine, width: int) -> dict[str, float]:
    """Microseconds by kind of call, for a decode step of `width` rows whose state the slots hold."""
    programs = engine.parts.programs
    products = whole_pass(programs.parts, DecodeRows(programs.parts, width))
    tail = Tail(programs.parts, programs.results)
    return _profile(engine, tail.decode(products, SampleKey(width, True, False)))


def profile_prefill(engine: CudaEngine, size: int) -> dict[str, float]:
    """The same for a pass of `size` rows, as the staging region describes it."""
    programs = engine.parts.programs
    return _profile(engine, pass_to_last_attention(programs.parts, PrefillRows(programs.parts, size)))


def _profile(engine: CudaEngine, calls: Sequence[Call]) -> dict[str, float]:
    kinds: dict[str, list[Call]] = {}
    for call in calls:
        kinds.setdefault(_kind(call), []).append(call)
    times = {f"{name} ×{len(same)}": _microseconds(engine, same) for name, same in kinds.items()}
    whole = _microseconds(engine, calls)
    return {**times, "sum": sum(times.values()), "whole": whole}


def _kind(call: Any) -> str:
    if isinstance(call, Gemm):
        return str(call.key)
    assert isinstance(call, Launch)
    return call.kernel.name


def _microseconds(engine: CudaEngine, calls: Sequence[Call]) -> float:
    """Median of a graph's replays."""
    stream = engine.parts.stream
    graph = Graph(stream, calls)
    start, end = Event(timing=True), Event(timing=True)
    times = []
    for _ in range(_REPLAYS + 2):
        stream.record(start)
        graph.launch()
        stream.record(end)
        end.synchronize()
        times.append(end.milliseconds_since(start) * 1e3)
    graph.close()
    start.close()
    end.close()
    return statistics.median(times[2:])
