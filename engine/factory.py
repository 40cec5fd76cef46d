"""Makes the engine that the options ask for. The only place that knows all engines; imports one of them."""

from __future__ import annotations

from importlib.util import find_spec

from engine.errors import ModelError
from engine.interface import Engine, Progress
from engine.options import EngineOptions


def load_engine(options: EngineOptions, progress: Progress | None = None) -> Engine:
    """Opens the model and loads it into an engine, telling `progress` how far it is.

    "auto" takes CUDA where the CUDA engine is installed and a GPU can be used, else the reference engine.
    Raises ModelError, with one clear message, for a model that cannot be used, an engine that is not
    there or sizes that do not fit.
    """
    engine = options.engine
    if engine == "auto":
        engine = "reference" if _why_no_cuda() is not None else "cuda"
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


def _unheard(stage: str, fraction: float) -> None:
    """Progress that nobody waits for."""


def _load_cuda(options: EngineOptions, progress: Progress | None) -> Engine:
    reason = _why_no_cuda()
    if reason is not None:
        raise ModelError(f"The CUDA engine cannot run here: {reason}. Use engine auto or reference.")
    from engine.cuda import load_cuda_engine  # type: ignore[import-not-found, unused-ignore]

    loaded: Engine = load_cuda_engine(options, progress)
    return loaded


def _why_no_cuda() -> str | None:
    """What stands in the way of the CUDA engine; None if nothing does."""
    if find_spec("engine.cuda") is None:
        return "this installation has no CUDA engine"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda-python is not installed (pip install 'slipstream-serve[cuda]')"
    from cuda.bindings import driver

    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:
        return f"the NVIDIA driver cannot be loaded ({error})"
    if status != driver.CUresult.CUDA_SUCCESS:
        return f"the NVIDIA driver does not start ({status.name})"
    status, count = driver.cuDeviceGetCount()
    if status != driver.CUresult.CUDA_SUCCESS or count == 0:
        return "there is no NVIDIA GPU"
    return None
