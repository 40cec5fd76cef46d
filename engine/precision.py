"""In which precision weights and the KV cache are held: what was asked for, or what suits the files.

Knows no engine and no device; what a device cannot do is the engine's to refuse.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from engine.checkpoint import Checkpoint, TensorType
from engine.config import ModelConfig, WeightScheme, expected_tensors
from engine.options import KvDtype, Precision

_FP8_SCHEMES = (WeightScheme.FP8_TENSOR, WeightScheme.FP8_ROW)
"""Whose scales the FP8 tier can take as they are: one per row, or one per tensor."""

_REORDERED = ("attention.q.weight", "attention.k.weight")


def own_precision(config: ModelConfig, stored: Counter[TensorType]) -> Precision:
    """The tier in which a checkpoint's linear layers lose nothing, or least.

    stored: elements of the linear layers' matrices by stored type, as stored_elements() counts them; empty
    if only the configuration is known. Files of which most is Q4_0 stay so, as users of GGUF expect;
    published FP8 weights with a scale per row or tensor stay FP8; all else becomes bf16.
    """
    if config.weight_format.scheme in _FP8_SCHEMES:
        return Precision.FP8
    if stored[TensorType.Q4_0] * 2 > stored.total():
        return Precision.Q4
    return Precision.BF16


def stored_elements(checkpoint: Checkpoint) -> Counter[TensorType]:
    """Elements of the layers' matrices by stored type, but for q and k: GGUF may have their rows in another
    order, so that to look at one is to read it.
    """
    counts: Counter[TensorType] = Counter()
    for name, shape in expected_tensors(checkpoint.config).items():
        if name.startswith("layers.") and len(shape) == 2 and not name.endswith(_REORDERED):
            counts[checkpoint.tensor(name).type] += prod(shape)
    return counts


def chosen_precision(asked: Precision, own: Precision) -> Precision:
    """What was asked for, or with AUTO the checkpoint's own."""
    return own if asked is Precision.AUTO else asked


def chosen_kv_dtype(asked: KvDtype) -> KvDtype:
    """What was asked for, or with AUTO bf16."""
    return KvDtype.BF16 if asked is KvDtype.AUTO else asked
