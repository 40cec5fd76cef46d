"""The line in which suspects wait for their trial, and newcomers behind them (see suspects.py for the rule).

Stands in front of the scheduler. Knows no engine, no queue and no process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from worker.messages import Rejected, RejectReason, StepTokens, Submit


@dataclass(frozen=True, slots=True)
class Held:
    """A request that waits for its turn."""

    front: int
    submit: Submit
    since: float

    def due(self, now: float) -> Submit:
        """The submission as it reads now, its time having run on."""
        left = self.submit.time_left_s
        if left is None:
            return self.submit
        return replace(self.submit, time_left_s=max(0.0, left - (now - self.since)))

    @property
    def keys(self) -> range:
        return range(self.submit.key, self.submit.key + self.submit.n)


class Quarantine:
    """Holds back suspects, so that one at a time is on trial, and newcomers meanwhile."""

    def __init__(self, proof: int, max_newcomers: int, clock: Callable[[], float]) -> None:
        """`proof`: see suspects.proof_tokens(); `max_newcomers`: sequences that may wait behind suspects."""
        self._proof = proof
        self._max_newcomers = max_newcomers
        self._clock = clock
        self._suspects: deque[Held] = deque()
        self._newcomers: deque[Held] = deque()
        self._on_trial: Held | None = None
        self._tokens_missing = 0

    @property
    def is_quiet(self) -> bool:
        """No suspect waits or is on trial, so ordinary requests need not wait."""
        return self._on_trial is None and not self._suspects and not self._newcomers

    @property
    def sequences_held(self) -> int:
        return sum(held.submit.n for line in (self._suspects, self._newcomers) for held in line)

    def hold(self, front: int, submit: Submit) -> Rejected | None:
        """Puts a request in line; the message to send back if the line is full."""
        held = Held(front, submit, self._clock())
        if submit.is_suspect:
            self._suspects.append(held)
            return None
        waiting = sum(other.submit.n for other in self._newcomers)
        if waiting + submit.n > self._max_newcomers and not submit.is_resubmission:
            message = "the queue is full while the worker recovers from a fault"
            return Rejected(submit.key, RejectReason.QUEUE_FULL, message, retry_after_s=1.0)
        self._newcomers.append(held)
        return None

    def releases(self) -> Iterator[tuple[int, Submit]]:
        """What may go to the scheduler now, taken out of the line. A suspect among them is on trial."""
        now = self._clock()
        if self._on_trial is None and self._suspects:
            held = self._suspects.popleft()
            self._on_trial = held
            self._tokens_missing = self._proof
            yield held.front, held.due(now)
        while self._newcomers and self._on_trial is None and not self._suspects:
            held = self._newcomers.popleft()
            yield held.front, held.due(now)

    def observe(self, front: int, message: StepTokens) -> None:
        """Learns from what the scheduler has for a front whether the suspect on trial has proved itself."""
        held = self._on_trial
        if held is None or front != held.front:
            return
        for key, count in zip(message.keys, message.counts, strict=True):
            if key in held.keys:
                self._tokens_missing -= count
        if self._tokens_missing <= 0 or any(done.key in held.keys for done in message.finished):
            self._on_trial = None

    def end_trial(self, front: int, keys: Iterable[int]) -> None:
        """These sequences were cancelled, rejected or halted: none of them keeps others waiting."""
        held = self._on_trial
        if held is not None and front == held.front and any(key in held.keys for key in keys):
            self._on_trial = None

    def cancel(self, front: int, keys: Iterable[int]) -> None:
        """Forgets requests of which the front wants no answer any more."""
        wanted = set(keys)
        self._keep(lambda held: held.front != front or not wanted.issuperset(held.keys))
        self.end_trial(front, wanted)

    def drop_front(self, front: int) -> None:
        self._keep(lambda held: held.front != front)
        if self._on_trial is not None and self._on_trial.front == front:
            self._on_trial = None

    def abort(self, request_id: str) -> list[Held]:
        """Takes the request's submissions out of the line and returns them."""
        lines = (*self._suspects, *self._newcomers)
        aborted = [held for held in lines if held.submit.request_id == request_id]
        self._keep(lambda held: held.submit.request_id != request_id)
        return aborted

    def take_all(self) -> list[Held]:
        """Empties the line."""
        everyone = [*self._suspects, *self._newcomers]
        self._keep(lambda _held: False)
        return everyone

    def _keep(self, is_kept: Callable[[Held], bool]) -> None:
        self._suspects = deque(filter(is_kept, self._suspects))
        self._newcomers = deque(filter(is_kept, self._newcomers))
