"""Why and how a server is to end: a drain, perhaps with a deadline; a failure; or at once.

The one place that signals, Control.Drain and dying processes report to. Knows no process and no RPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import time


class ServerFailed(Exception):
    """The server cannot start or go on; str() is one clear line for a person."""


class StoppedAtOnce(Exception):
    """A second signal: end without waiting for anything."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_code = 128 + signal_number


class Shutdown:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._is_wanted = False
        self._deadline: float | None = None
        self._failure: str | None = None
        self._signal: int | None = None
        self._changed = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether the server is to end, in whatever way."""
        return self._is_wanted

    @property
    def is_at_once(self) -> bool:
        return self._signal is not None

    @property
    def time_left_s(self) -> float | None:
        """Until running requests are to be cut off; None: never."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def drain(self, timeout_s: float | None) -> None:
        """Finish what runs, for at most so long. Called again, it changes only the time."""
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._is_wanted = True
        self.notify()

    def fail(self, message: str) -> None:
        """No process can serve any more."""
        self._failure = self._failure or message
        self._is_wanted = True
        self.notify()

    def interrupt(self, signal_number: int, drain_timeout_s: float | None) -> None:
        """SIGINT or SIGTERM: the first drains, the second ends at once."""
        if self._is_wanted:
            self._signal = signal_number
            self.notify()
        else:
            self.drain(drain_timeout_s)

    def notify(self) -> None:
        """Wakes whoever waits for a change, of this or of what they count."""
        self._changed.set()

    async def wait_changed(self, timeout_s: float | None = None) -> None:
        """Until the next notify(), at most `timeout_s`. Raises as raise_if_over()."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()
        self.raise_if_over()

    async def wait_wanted(self) -> None:
        """Until the server is to end. Raises as raise_if_over()."""
        self.raise_if_over()
        while not self._is_wanted:
            await self.wait_changed()

    def raise_if_over(self) -> None:
        """Raises StoppedAtOnce or ServerFailed where there is nothing left to wait for."""
        if self._signal is not None:
            raise StoppedAtOnce(self._signal)
        if self._failure is not None:
            raise ServerFailed(self._failure)
