"""Makes the engine that the options ask for. The only place that knows all engines; imports one of them."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import structlog

from engine.errors import ModelError
from engine.interface import Engine, Progress
from engine.options import EngineOptions

log = structlog.get_logger(__name__)


def load_engine(options: EngineOptions, progress: Progress | None = None) -> Engine:
    """Opens the model and loads it into an engine, telling `progress` how far it is.

    "auto" takes CUDA where the CUDA engine is installed and a GPU can be used, else the reference engine,
    whose info.fallbacks then says why.
    Raises ModelError, with one clear message, for a model that cannot be used, an engine that is not
    there or sizes that do not fit.
    """
    engine = (
        _load_auto(options, progress)
        if options.engine == "auto"
        else _load(options.engine, options, progress)
    )
    for reason in engine.info.fallbacks:
        log.info("engine_fallback", engine=engine.info.engine, reason=reason)
    return engine


def _load_auto(options: EngineOptions, progress: Progress | None) -> Engine:
    reason = _why_no_cuda(options.device)
    if reason is None:
        return _load("cuda", options, progress)
    engine = _load("reference", options, progress)
    fallback = f"the reference engine runs instead of the CUDA engine: {reason}"
    engine.info = replace(engine.info, fallbacks=(fallback, *engine.info.fallbacks))
    return engine


def _load(engine: str, options: EngineOptions, progress: Progress | None) -> Engine:
    if engine == "reference":
        return _load_reference(options, progress)
    if engine == "simulated":
        return _load_simulated(options, progress)
    if engine == "cuda":
        return _load_cuda(options, progress)
    raise ModelError(f"There is no engine {engine!r}; choose auto, cuda, reference or simulated.")


def _load_reference(options: EngineOptions, progress: Progress | None) -> Engine:
    from engine.checkpoint import open_checkpoint
    from engine.reference import ReferenceEngine

    with open_checkpoint(options.model) as checkpoint:
        return ReferenceEngine(checkpoint, options, progress)


def _load_simulated(options: EngineOptions, progress: Progress | None) -> Engine:
    from engine.simulated import SimulatedEngine

    return SimulatedEngine.load(options, progress or (lambda stage, share: None))


def _load_cuda(options: EngineOptions, progress: Progress | None) -> Engine:
    reason = _why_no_cuda(options.device)
    if reason is not None:
        raise ModelError(f"The CUDA engine cannot run here: {reason}. Use engine auto or reference.")
    from engine.cuda.loading import load_cuda_engine

    return load_cuda_engine(options, progress)


def _why_no_cuda(device: int) -> str | None:
    """What stands in the way of the CUDA engine on that GPU; None if nothing does. Creates no context."""
    for module in ("cuda", "cuda.bindings", "cuda.pathfinder", "nvmath"):
        if find_spec(module) is None:
            return f"{module} is not installed (pip install 'slipstream-serve[cuda]')"
    from engine.cuda.device import why_no_gpu

    return why_no_gpu(device)
