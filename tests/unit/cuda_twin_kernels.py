"""Carries out a launch by the numpy twin of its kernel, from the very arguments that were packed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kernels.slots import SlotArrays
from kernels.tensor_map import TensorMap
from tests.unit import cuda_twin_attention as attention
from tests.unit import cuda_twin_fp8 as fp8
from tests.unit import cuda_twin_q4 as q4
from tests.unit import cuda_twin_rows as rows
from tests.unit import cuda_twin_sampling as sampling
from tests.unit.cuda_twin_memory import view

__all__ = ["run", "view"]

_SCALARS = {
    "p": ctypes.c_uint64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "S": SlotArrays,
    "M": TensorMap,
    "x": None,
}


def run(expression: str, grid: tuple[int, ...], pointers: int) -> None:
    """Carries out one launch."""
    name, _, parameters = expression.partition("<")
    arguments = [p.strip() for p in parameters.rstrip(">").split(",")] if parameters else []
    layout, twin = _TWINS[name]
    addresses = (ctypes.c_void_p * len(layout)).from_address(pointers)
    values = [_value(kind, address) for kind, address in zip(layout, addresses, strict=True)]
    if twin is not None:
        twin(grid, arguments, *values)


def _value(kind: str, address: int) -> Any:
    c_type = _SCALARS[kind]
    if c_type is None:
        return None
    value = c_type.from_address(address)
    if kind == "M":
        return int(value.opaque[0])  # where the twin of its encoder puts the address
    return value if kind == "S" else value.value


_TWINS: dict[str, tuple[str, Callable[..., None] | None]] = {
    "embed": ("pppppiif", rows.embed),
    "add_rms_norm": ("ppppppppiff", rows.norm),
    "gated_activation": ("ppppi", rows.gated),
    "gated_activation_fp8": ("pppppi", rows.gated_quantised),
    "quantise_rows": ("pppi", fp8.quantise),
    "skinny_product": ("pppppiiiff", rows.skinny),
    "skinny_stream": ("pppppiiiiiiff", rows.stream),
    "skinny_rows": ("pppiiiiiiii", rows.stream_rows),
    "q4_quantise": ("pppi", q4.q4_quantise),
    "q4_repack": ("pppi", q4.q4_repack),
    "q4_dequantise": ("pppi", q4.q4_dequantise),
    "q4_gemm": ("ppppiiiii", q4.q4_gemm),
    "rope_and_write": ("p" * 16 + "iiiiff", attention.rope),
    "rope_and_quantise": ("p" * 16 + "iiiiiff", attention.rope_and_quantise),
    "attention_step": ("p" * 17 + "iiiiifff", attention.step),
    "plan_decode": ("ppppppiiii", attention.plan_decode),
    "attention_decode": ("p" * 9 + "iiif", attention.decode),
    "merge_splits": ("ppppii", None),
    "attention_prefill": ("p" * 9 + "iiiif", attention.prefill),
    "attention_prefill_wgmma": ("pMMppppiiiif", attention.prefill_wgmma),
    "sample_scan": ("", None),
    "sample_weigh": ("", None),
    "sample_cut": ("", None),
    "sample_collect": ("", None),
    "sample_finish": ("ppSxppiii", sampling.finish),
    "logprob_chunks": ("", None),
    "logprob_rows": ("ppppSpppppii", sampling.logprobs),
    "change_slots": ("pppSpi", sampling.change),
    "start_slots": ("ppppS", sampling.start),
}
"""Kinds of arguments (pointer, int32, float, slots, tensor map, x: not looked at) and the twin, by kernel."""
