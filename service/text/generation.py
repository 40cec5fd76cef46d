"""What the model's authors recommend for sampling (generation_config.json).

Knows nothing of requests: a servicer fills the fields a request leaves out from these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults that the model states; None where it states none."""

    temperature: float | None = None
    """0 where the model states `do_sample: false`."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
