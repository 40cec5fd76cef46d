"""What programs are built from, and what they are made of: calls that enqueue themselves on a stream.

Knows no layer. Calls hold addresses of buffers planned before; running one allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine.config import ModelConfig
from engine.cuda.buffers import Buffers
from engine.cuda.gemm_key import GemmKey
from engine.cuda.memory import Arena
from engine.cuda.weights import ModelWeights
from kernels.device import DeviceLimits
from kernels.launch import KernelLibrary
from kernels.tensor import Tensor

Call = Callable[[int], None]
"""Enqueues itself on a stream: a kernel launch or a matrix product of fixed buffers."""


class Plan(Protocol):
    """How to compute a product: a GemmPlan."""

    def bind(
        self,
        *,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        workspace: Tensor,
        bias: Tensor | None = None,
        c: Tensor | None = None,
    ) -> Call: ...


class Planner(Protocol):
    """Where matrix products come from: a GemmPlanner."""

    def plan(self, key: GemmKey) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one engine."""

    config: ModelConfig
    weights: ModelWeights
    buffers: Buffers
    staging: Arena
    """The staging region on the device."""
    library: KernelLibrary
    limits: DeviceLimits
    planner: Planner
    skinny: bool
    """Own kernels, not cuBLASLt, for bf16 products of few rows."""


class KeyCollector:
    """A planner for programs that are built for the keys of their products alone."""

    def __init__(self) -> None:
        self.keys: dict[GemmKey, None] = {}

    def plan(self, key: GemmKey) -> KeyCollector:
        self.keys[key] = None
        return self

    def bind(self, **operands: Tensor | None) -> Call:
        return _nothing


def _nothing(stream: int) -> None:
    """Never enqueued."""


def distinct_layers(parts: Parts) -> Parts:
    """The same model with one layer of each kind: enough to learn the keys of all products."""
    layers = dict(zip(parts.config.layers, parts.weights.layers, strict=True))
    return replace(
        parts,
        config=replace(parts.config, layers=tuple(layers)),
        weights=replace(parts.weights, layers=tuple(layers.values())),
    )
