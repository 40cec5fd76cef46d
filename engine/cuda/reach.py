"""Which sequences make a decode step take the program for long ones. Knows no plan and no slot.

Attention spreads a row over blocks as far as the other rows leave room. So a wide step is quick while its
sequences are of a size, and one that is much longer would keep the device waiting: then every row gets as
many blocks as there may be.
"""

from __future__ import annotations

from engine.cuda.buffers import BufferPlan
from kernels import attention_step
from kernels.attention_step import Reach


def reach(plan: BufferPlan, width: int) -> Reach | None:
    """Which sequences are long among `width` decode rows; None if none is."""
    if not attention_step.serves(plan.limits, plan.sizes.kv):
        return None
    found = []
    for mixer in plan.mixers:
        of_layer = attention_step.reach(plan.limits, width, mixer.n_kv_heads)
        if of_layer is not None and (mixer.window is None or mixer.window > of_layer.tokens):
            found.append(of_layer)
    if not found:
        return None
    return Reach(min(r.tokens for r in found), min(r.share for r in found))
