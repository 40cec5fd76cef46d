"""CUDA graphs: calls captured once, replayed with one launch. Knows no model.

Nothing that a graph's calls touch may be freed or moved while it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from cuda.bindings import driver

from engine.cuda.device import Stream, check, check_freed
from engine.cuda.owned import Owned

Key = TypeVar("Key", bound=Hashable)


class Runnable(Protocol):
    """Enqueues itself on the stream it was made for."""

    def launch(self) -> None: ...

    def close(self) -> None: ...


class Graph:
    """Calls captured from one stream and replayed on it."""

    def __init__(self, stream: Stream, calls: Sequence[Callable[[int], None]]) -> None:
        """Captures; runs nothing. Raises CudaError, KernelLaunchError."""
        self._stream = stream.handle
        with Owned() as made:
            graph = _captured(stream, calls)
            made.then(lambda: check_freed(driver.cuGraphDestroy(graph), "destroying a graph"))
            self.nodes = int(check(driver.cuGraphGetNodes(graph), "counting a graph's nodes")[1])
            self._executable = check(driver.cuGraphInstantiate(graph, 0), "instantiating a graph")
            with Owned() as uploaded:
                uploaded.add(self)
                check(driver.cuGraphUpload(self._executable, stream.handle), "uploading a graph")
                uploaded.release()

    def launch(self) -> None:
        """Enqueues a replay."""
        check(driver.cuGraphLaunch(self._executable, self._stream), "launching a graph")

    def close(self) -> None:
        """Idempotent; its replays must be over."""
        executable, self._executable = self._executable, None
        if executable is not None:
            check_freed(driver.cuGraphExecDestroy(executable), "destroying a graph")


def _captured(stream: Stream, calls: Sequence[Callable[[int], None]]) -> Any:
    """A CUgraph of the calls."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(driver.cuStreamBeginCapture(stream.handle, mode), "starting a capture")
    try:
        for call in calls:
            call(stream.handle)
    except BaseException:
        status, unfinished = driver.cuStreamEndCapture(stream.handle)
        if not int(status):
            driver.cuGraphDestroy(unfinished)
        raise
    return check(driver.cuStreamEndCapture(stream.handle), "ending a capture")


class Eager:
    """Calls made one by one, every time."""

    def __init__(self, stream: Stream, calls: Sequence[Callable[[int], None]]) -> None:
        self._stream = stream.handle
        self._calls = tuple(calls)
        self.nodes = len(self._calls)

    def launch(self) -> None:
        for call in self._calls:
            call(self._stream)

    def close(self) -> None:
        """Nothing to free."""


class Runs(Generic[Key]):
    """Runnables by key, each made when it is first asked for and kept."""

    def __init__(self, make: Callable[[Key], Runnable]) -> None:
        self._make = make
        self._made: dict[Key, Runnable] = {}

    def __getitem__(self, key: Key) -> Runnable:
        self.make(key)
        return self._made[key]

    def make(self, key: Key) -> None:
        """Makes it, if it is not there yet."""
        if key not in self._made:
            self._made[key] = self._make(key)

    def __len__(self) -> int:
        return len(self._made)

    def close(self) -> None:
        with Owned() as made:
            while self._made:
                made.add(self._made.popitem()[1])
