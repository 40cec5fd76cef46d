"""From which length on a sequence makes a decode step take the program for long ones. Knows no plan.

Attention spreads a row over blocks as far as the other rows leave room. So a wide step is quick while its
sequences are of a size, and a long one among them would keep the device waiting: then every row gets as many
blocks as there may be.
"""

from __future__ import annotations

from engine.cuda.buffers import BufferPlan
from kernels import attention_step


def long_context(plan: BufferPlan, width: int) -> int | None:
    """Sequences of more tokens are long among `width` decode rows; None if none is."""
    if not attention_step.serves(plan.limits, plan.sizes.kv):
        return None
    bounds = []
    for mixer in plan.mixers:
        bound = attention_step.long_context(plan.limits, width, mixer.n_kv_heads)
        if bound is not None and (mixer.window is None or mixer.window > bound):
            bounds.append(bound)
    return min(bounds, default=None)
