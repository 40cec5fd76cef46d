"""How a model's matrix products are computed at each number of rows and, on a GPU, how fast.

Arms come from the code that programs are built with; times are of the very calls that programs make, so they
include the norm before q|k|v, gate|up and the head and the activation behind gate|up. Weights are random.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from engine.checkpoint import Checkpoint, TensorType
from engine.checkpoint.tensor import Tensor as StoredTensor
from engine.config import Activation, AttentionSpec, DenseSpec, ModelConfig, expected_tensors
from engine.cuda.buffers import Buffers, part
from engine.cuda.device import Event, check
from engine.cuda.engine import CudaEngine
from engine.cuda.graphs import Graph
from engine.cuda.loading import load_from
from engine.cuda.memory import Arena
from engine.cuda.parts import Call, KeyCollector, Parts
from engine.cuda.planning import EnginePlan
from engine.cuda.products import Arm, Norm, pick_arm, pick_head_arm
from engine.cuda.products_fp8 import make_products
from engine.cuda.program import final_norm
from engine.cuda.settings import CudaSettings
from engine.cuda.weight_conversion import round_to_bf16
from engine.cuda.weights import Weight, tensors_of, weights_in
from engine.interface import pages_for
from engine.options import EngineOptions, Precision
from engine.product_figures import ProductFigure
from kernels.launch import KernelLibrary
from kernels.skinny import Finish
from kernels.tensor import Tensor

_REPLAYS = 7
_LAUNCHES = 4
"""Graphs launched in a row for one time."""
_LENGTH = 4096
"""Positions, which products do not depend on."""
_NOISE = 1 << 22
"""Elements of the block of noise that all random weights are cut from."""
_SHIFT = 32
"""Elements from one row's place in the noise to the next row's."""


def list_products(plan: EnginePlan, rows: Sequence[int]) -> list[ProductFigure]:
    """The arms of a planned engine, as its programs would take them. Needs no GPU."""
    arena = Arena(plan.layout, 1 << 20)
    parts = Parts(
        config=plan.config,
        weights=weights_in(arena, plan.config, plan.tier.precision),
        buffers=Buffers(plan.buffers, arena),
        staging=plan.stager.region.on_device(arena),
        library=KernelLibrary([], dependent_launch=False),
        limits=plan.buffers.limits,
        planner=KeyCollector(),
        skinny=CudaSettings().skinny,
    )
    return [figure for count in rows for figure in _figures(parts, count)]


def measure_products(
    config: ModelConfig,
    options: EngineOptions,
    precision: Precision,
    rows: Sequence[int],
    progress: Callable[[float], None],
) -> Iterator[ProductFigure]:
    """The same with times, on GPU options.device.

    Loads the model with random weights, all its layers, so that no product finds its weights in L2, and with
    KV pages for one sequence.
    Raises ModelError, EngineError.
    """
    length = min(options.max_sequence_length or _LENGTH, config.max_sequence_length)
    chosen = replace(options, precision=precision, max_sequence_length=length, kv_pages=pages_for(length))
    engine = load_from(random_checkpoint(config), chosen, None, CudaSettings(capture=False))
    try:
        parts = engine.parts.programs.parts
        _fill(parts)
        for done, count in enumerate(rows, start=1):
            for figure in _figures(parts, count):
                yield replace(figure, microseconds=_time(engine, figure))
            progress(done / len(rows))
    finally:
        engine.close()


def random_checkpoint(config: ModelConfig) -> Checkpoint:
    """A checkpoint of that shape in bf16, normal with standard deviation 0.02, norms around 1. It takes 8 MB:
    a row is the row above it, shifted.
    """
    bits = _noise()

    def tensor(name: str, shape: tuple[int, ...]) -> StoredTensor:
        data = _cut(bits, shape)
        if "norm" in name:
            data = np.full((1, shape[0]), 0x3F80, np.uint16).view(np.uint8)
        return StoredTensor(name, TensorType.BF16, shape, data)

    loaders = {
        name: lambda name=name, shape=shape: tensor(name, shape)
        for name, shape in expected_tensors(config).items()
    }
    return Checkpoint(Path("random"), config, loaders, ())


@cache
def _noise() -> NDArray[np.uint16]:
    """bf16 bits."""
    values = np.random.default_rng(0).standard_normal(_NOISE, np.float32) * np.float32(0.02)
    bits = np.empty(_NOISE, np.uint16)
    round_to_bf16(values, bits)
    return bits


def _cut(bits: NDArray[np.uint16], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """u8 [rows, row bytes], a view: rows begin _SHIFT elements after one another, and anew at the end."""
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape
    whole = np.resize(bits, max(len(bits), columns + rows * _SHIFT)).view(np.uint8)
    return np.lib.stride_tricks.as_strided(whole, (rows, 2 * columns), (2 * _SHIFT, 1), writeable=False)


def _figures(parts: Parts, rows: int) -> Iterator[ProductFigure]:
    """Without times."""
    layer, spec = parts.weights.layers[0], parts.config.layers[0].feed_forward
    is_fused = isinstance(spec, DenseSpec) and spec.activation is Activation.SILU and not spec.bias
    of_layer: dict[str, tuple[Weight, Finish]] = {
        "q|k|v": (layer.mixer.qkv.weight, Finish.STORE),
        "o": (layer.mixer.o.weight, Finish.ADD),
        "gate|up": (layer.feed_forward.gate_up.weight, Finish.SWIGLU if is_fused else Finish.STORE),
        "down": (layer.feed_forward.down.weight, Finish.ADD),
    }
    for name, (weight, finish) in of_layer.items():
        yield _figure(name, weight, rows, pick_arm(parts, rows, weight, finish))
    if rows <= parts.buffers.plan.sizes.logit_rows:
        head = parts.weights.head
        yield _figure("head", head, rows, pick_head_arm(parts, rows, head))


def _figure(product: str, weight: Weight, rows: int, arm: Arm) -> ProductFigure:
    n, k = weight.shape
    size = sum(tensor.bytes for tensor in tensors_of(weight))
    return ProductFigure(product, n, k, rows, str(arm), size)


def _calls(parts: Parts, figure: ProductFigure, index: int) -> list[Call]:
    """What programs enqueue for the product of one layer."""
    calls: list[Call] = []
    activations, rows = parts.buffers.activations, figure.rows
    products = make_products(parts, activations, rows, calls)
    spec, weights = parts.config.layers[index], parts.weights.layers[index]
    assert isinstance(spec.mixer, AttentionSpec)
    assert isinstance(spec.feed_forward, DenseSpec)
    if figure.product == "q|k|v":
        y = part(activations.qkv, rows, figure.n)
        products.project(Norm(weights.input_norm, spec.norm), weights.mixer.qkv, y)
    elif figure.product == "o":
        products.add(part(activations.attended, rows, spec.mixer.q_dim), weights.mixer.o)
    elif figure.product == "head":
        logits = parts.buffers.logits.logits.rows(0, rows)
        products.head(final_norm(parts), parts.weights.head, logits)
    else:
        norm = Norm(weights.feed_forward_norm, spec.norm)
        products.feed_forward(norm, spec.feed_forward, weights.feed_forward)
        down = 2 if _arm_of_down(parts, rows, index) is Arm.DEQUANTISED else 1
        return calls[-down:] if figure.product == "down" else calls[:-down]
    return calls


def _arm_of_down(parts: Parts, rows: int, index: int) -> Arm:
    return pick_arm(parts, rows, parts.weights.layers[index].feed_forward.down.weight, Finish.ADD)


def _time(engine: CudaEngine, figure: ProductFigure) -> float:
    """Microseconds of one layer's product, the median of graph replays that run through all layers."""
    parts, stream = engine.parts.programs.parts, engine.parts.stream
    layers = 1 if figure.product == "head" else len(parts.config.layers)
    calls = [call for index in range(layers) for call in _calls(parts, figure, index)]
    for call in calls:  # what the driver loads when it is first needed must not be loaded in a capture
        call(stream.handle)
    stream.synchronize()
    graph, began, ended = Graph(stream, calls), Event(timing=True), Event(timing=True)
    times = []
    try:
        graph.launch()
        for _ in range(_REPLAYS):
            stream.record(began)
            for _ in range(_LAUNCHES):
                graph.launch()
            stream.record(ended)
            ended.synchronize()
            times.append(ended.milliseconds_since(began) * 1e3 / (_LAUNCHES * layers))
    finally:
        graph.close()
        began.close()
        ended.close()
    return statistics.median(times)


def _fill(parts: Parts) -> None:
    """Random inputs: products of zeros draw less power, and so run at a higher clock."""
    activations = parts.buffers.activations
    for buffer in (activations.residual, activations.attended, activations.activated):
        _upload(np.resize(_noise(), prod(buffer.shape)), buffer)


def _upload(bits: NDArray[np.uint16], target: Tensor) -> None:
    check(driver.cuMemcpyHtoD(target.address, bits.ctypes.data, bits.nbytes), "copying noise")
