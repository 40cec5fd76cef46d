"""A load that fails gives back all that it has made, and raises what made it fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.checkpoint import open_checkpoint
from engine.cuda import loading, programs, regions, weight_loading, weight_pieces
from engine.cuda.device import CudaError, OutOfDeviceMemory
from engine.cuda.owned import Owned
from engine.cuda.weight_pieces import Piece
from engine.errors import CheckpointError
from engine.interface import EngineError
from engine.options import Precision
from kernels.errors import KernelError
from tests.cuda_scenarios import checkpoint, options, prompt
from tests.parity.reference_driver import Driver
from tests.unit.cuda_twin import LIVE, SETTINGS, HostDevice, HostLibrary, HostPlanner, HostThing, Loader
from tests.unit.cuda_twin import load_twin as load_twin

TUNED = replace(SETTINGS, tune=True)


@dataclass(frozen=True)
class Fault:
    """Makes something fail, at the given call of it, and says how."""

    owner: Any
    name: str
    error: BaseException
    at: int = 1
    raised: type[BaseException] | None = None
    """What comes out of it; None: the error itself."""
    tier: Precision = Precision.Q4
    """That has a stage for it."""

    def install(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[], None] = lambda: None) -> None:
        """before: called right before it fails."""
        real, left = getattr(self.owner, self.name), self.at

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                before()
                raise self.error
            return real(*arguments, **named)

        monkeypatch.setattr(self.owner, self.name, call)


ILLEGAL = CudaError("work on the GPU", 700, "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal access")
FAULTS = {
    "stream": Fault(HostDevice, "stream", CudaError("creating a stream", 2, "out of memory")),
    "arena": Fault(HostDevice, "allocate", OutOfDeviceMemory("allocating", 2, "out of memory")),
    "pinned memory of weights": Fault(weight_loading, "PinnedBuffer", CudaError("pinning", 2, "full"), at=2),
    "converting kernels": Fault(HostLibrary, "load_all", KernelError("no such symbol"), 1, EngineError),
    "first weight": Fault(Piece, "write", CheckpointError("model.safetensors has shrunk")),
    "some weight": Fault(Piece, "write", CheckpointError("model.safetensors has shrunk"), at=9),
    "rope tables": Fault(loading, "rope_values", MemoryError("tables")),
    "compiling": Fault(
        HostLibrary, "build", KernelError("norm.cu does not compile"), 1, EngineError, Precision.BF16
    ),
    "modules": Fault(HostLibrary, "load_all", KernelError("no image for the device"), 2, EngineError),
    "cublaslt": Fault(loading, "GemmPlanner", CudaError("finding an algorithm", 0, "no library")),
    "tuning": Fault(HostPlanner, "plan_all", ILLEGAL),
    "pinned memory of steps": Fault(regions, "PinnedBuffer", CudaError("pinning", 2, "full"), at=4),
    "first graph": Fault(programs, "Graph", ILLEGAL),
    "some graph": Fault(programs, "Graph", ILLEGAL, at=3),
    "last copies": Fault(loading, "SlotControl", CudaError("copying", 1, "invalid value")),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_all_is_given_back(
    tmp_path: Path, load_twin: Loader, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """HostDevice.close sees to the order: the context goes last, and empty."""
    checkpoint(tmp_path)
    with monkeypatch.context() as broken:
        fault.install(broken)
        with pytest.raises(fault.raised or type(fault.error)) as caught:
            load_twin(options(tmp_path, precision=fault.tier), TUNED)
    assert fault.error in (caught.value, caught.value.__cause__)
    assert not getattr(caught.value, "__notes__", None)
    assert LIVE == []
    driver = Driver(load_twin(options(tmp_path, precision=fault.tier), TUNED))
    driver.start(0, prompt(9))
    driver.prefill(0)
    driver.decode(2)
    assert len(driver.tokens[0]) == 3


@pytest.mark.parametrize("stage", ["weights", "tuning", "graphs"])
def test_an_interrupt_is_a_failure_too(tmp_path: Path, load_twin: Loader, stage: str) -> None:
    checkpoint(tmp_path)
    heard: list[str] = []

    def interrupt(now: str, share: float) -> None:
        heard.append(now)
        if now == stage:
            raise KeyboardInterrupt

    with open_checkpoint(tmp_path) as opened, pytest.raises(KeyboardInterrupt):
        loading.load_from(opened, options(tmp_path), interrupt, TUNED)
    assert heard[-1] == stage
    assert LIVE == []


@pytest.mark.parametrize("name", ["some weight", "modules", "tuning", "some graph"])
def test_what_cannot_be_closed_hides_nothing(
    tmp_path: Path, load_twin: Loader, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each close fails, and so does waiting; all are tried all the same."""
    checkpoint(tmp_path)
    fault, closed = FAULTS[name], []

    def failing(close: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(thing: Any) -> None:
            close(thing)
            closed.append(type(thing).__name__)
            raise CudaError("closing", 700, "an illegal access")

        return call

    with monkeypatch.context() as broken:

        def break_context() -> None:
            broken.setattr(HostDevice, "close", failing(HostThing.close))
            broken.setattr(HostThing, "close", failing(HostThing.close))
            broken.setattr(HostDevice, "synchronize", failing(lambda device: None))

        fault.install(broken, break_context)
        with pytest.raises(fault.raised or type(fault.error)) as caught:
            load_twin(options(tmp_path, precision=fault.tier), TUNED)
    assert fault.error in (caught.value, caught.value.__cause__)
    assert any("While closing" in note for note in caught.value.__notes__)
    assert closed[-1] == "HostDevice"
    assert LIVE == []


class Part:
    """Notes that it was closed, and fails if told to."""

    def __init__(self, log: list[int], number: int, error: Exception | None = None) -> None:
        self._log, self._number, self._error = log, number, error

    def close(self) -> None:
        self._log.append(self._number)
        if self._error is not None:
            raise self._error


def test_owned_things_are_closed_last_first_and_once() -> None:
    log: list[int] = []
    with Owned() as made:
        first = made.add(Part(log, 1))
        made.then(lambda: log.append(2))
        made.add(Part(log, 3))
        assert isinstance(first, Part)
        assert log == []
    assert log == [3, 2, 1]
    with Owned() as made:
        made.add(Part(log, 4))
        made.release()
    assert log == [3, 2, 1]


def test_without_another_error_the_first_failure_is_raised() -> None:
    log: list[int] = []
    made = Owned()
    made.add(Part(log, 1, ValueError("one")))
    made.add(Part(log, 2, ValueError("two")))
    with pytest.raises(ValueError, match="two") as caught, made:
        pass
    assert log == [2, 1]
    assert caught.value.__notes__ == ["While closing after this: one"]


def test_pinned_memory_of_a_buffer_that_grows_is_given_back(
    tmp_path: Path, load_twin: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that no staging buffer was made for."""
    monkeypatch.setattr(weight_pieces, "STAGING_BYTES", 64)
    checkpoint(tmp_path)
    Fault(weight_loading, "PinnedBuffer", CudaError("pinning", 2, "full"), at=6).install(monkeypatch)
    with pytest.raises(CudaError, match="pinning failed: full"):
        load_twin(options(tmp_path), SETTINGS)
    assert LIVE == []
