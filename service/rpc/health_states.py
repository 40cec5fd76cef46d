"""What each name in grpc.health.v1 stands for: from the server's condition to one state per name.

Loading, serving, degraded and draining are told apart by the names "loaded", "admitting" and "complete".
The table is also in control.proto, for people who only read that.
"""

from __future__ import annotations

from dataclasses import dataclass

INFERENCE_SERVICES = ("slipstream.v1.Inference", "vllm.grpc.engine.VllmEngine")


@dataclass(frozen=True, slots=True)
class Condition:
    """What health depends on."""

    workers_ready: tuple[bool, ...]
    """By worker index."""
    is_draining: bool = False
    queue_has_room: bool = True
    """Whether a request that came now would be admitted by some worker's queue."""


def health_states(condition: Condition) -> dict[str, bool]:
    """By name, whether it is SERVING."""
    is_loaded = any(condition.workers_ready)
    is_serving = is_loaded and not condition.is_draining
    states = {
        "": is_serving,
        **dict.fromkeys(INFERENCE_SERVICES, is_serving),
        "readiness": is_serving and condition.queue_has_room,
        "loaded": is_loaded,
        "admitting": not condition.is_draining,
        "complete": is_loaded and all(condition.workers_ready),
        "liveness": True,
        "slipstream.v1.Control": True,
    }
    for index, is_ready in enumerate(condition.workers_ready):
        states[f"worker/{index}"] = is_ready
    return states
