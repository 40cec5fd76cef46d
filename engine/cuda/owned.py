"""What has been made and must be closed again, the last made first. Knows nothing of what it holds.

Who makes several things puts each in here, and releases all once they have an owner; if making fails before,
all are closed, and the error that comes out is the one that was the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeVar


class Closable(Protocol):
    """Holds something until it is closed."""

    def close(self) -> None: ...


Made = TypeVar("Made", bound=Closable)


class Owned:
    """Closes, at the end of a with block, what was added in it and not released."""

    def __init__(self) -> None:
        self._closes: list[Callable[[], None]] = []

    def add(self, made: Made) -> Made:
        """Its close() is called at the end."""
        self._closes.append(made.close)
        return made

    def then(self, close: Callable[[], None]) -> None:
        """Called at the end, before what was added earlier is closed."""
        self._closes.append(close)

    def release(self) -> None:
        """Another owner has all of it: nothing is closed."""
        self._closes.clear()

    def __enter__(self) -> Owned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes all, whichever of them fail. Their failures are notes on the block's error; without one, the
        first is raised.
        """
        failures: list[Exception] = []
        while self._closes:
            try:
                self._closes.pop()()
            except Exception as failure:  # noqa: BLE001 - none may keep the others from being closed
                failures.append(failure)
        if error is None and failures:
            error = failures.pop(0)
            _note(error, failures)
            raise error
        if error is not None:
            _note(error, failures)


def _note(error: BaseException, failures: list[Exception]) -> None:
    for failure in failures:
        error.add_note(f"While closing after this: {failure}")
