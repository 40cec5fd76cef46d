"""All kernels there are, by family: what `slipstream kernels build` compiles and `list` shows."""

from __future__ import annotations

from kernels import (
    activation,
    attention_decode,
    attention_prefill,
    attention_step,
    embedding,
    fp8,
    logprobs,
    norm,
    q4,
    q4_gemm,
    rope,
    sampling,
    skinny,
    skinny_rows,
    skinny_stream,
    slots,
)
from kernels.compiler import CompileUnit

FAMILIES: dict[str, tuple[CompileUnit, ...]] = {
    "norm": norm.UNITS,
    "rope": rope.UNITS,
    "activation": activation.UNITS,
    "fp8": fp8.UNITS,
    "skinny": (*skinny.UNITS, *skinny_stream.UNITS, *skinny_rows.UNITS),
    "q4": (*q4.UNITS, *q4_gemm.UNITS),
    "embedding": embedding.UNITS,
    "attention_decode": attention_decode.UNITS,
    "attention_prefill": attention_prefill.UNITS,
    "attention_step": attention_step.UNITS,
    "sampling": sampling.UNITS,
    "logprobs": logprobs.UNITS,
    "slots": slots.UNITS,
}


def all_units() -> tuple[CompileUnit, ...]:
    """Every unit, those that take longest to compile first."""
    slow = ("attention_prefill", "attention_step", "attention_decode", "sampling")
    families = [*slow, *(name for name in FAMILIES if name not in slow)]
    return tuple(unit for name in families for unit in FAMILIES[name])
