"""Per-stage timings of the step loop, measured only while somebody has asked. Knows no stage by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from worker.messages import ProfileDone, ProfileStart, StageStats

Clock = Callable[[], float]


@dataclass(slots=True)
class _Session:
    """One request for timings."""

    front: int
    start: ProfileStart
    deadline: float
    steps: int = 0
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Microseconds by stage, one per step that had the stage."""

    def done(self) -> ProfileDone:
        stages = [_stats(stage, samples) for stage, samples in self.samples.items()]
        return ProfileDone(self.start.ticket, self.steps, stages)


def _stats(stage: str, samples: list[float]) -> StageStats:
    values = np.asarray(samples)
    return StageStats(
        stage,
        mean=float(values.mean()),
        median=float(np.median(values)),
        p99=float(np.percentile(values, 99)),
        total=float(values.sum()),
    )


class StageClock:
    """Attributes the loop's time to stages: lap(stage) claims all since the last lap or begin()."""

    def __init__(self, clock: Clock) -> None:
        """`clock`: seconds, monotonic."""
        self._clock = clock
        self._sessions: list[_Session] = []
        self._last = 0.0
        self._step: dict[str, float] = defaultdict(float)

    def start(self, front: int, request: ProfileStart) -> None:
        now = self._clock()
        if not self._sessions:
            self._last = now
            self._step.clear()
        self._sessions.append(_Session(front, request, now + request.timeout_s))

    def begin(self) -> None:
        """Time until now belongs to no stage."""
        if self._sessions:
            self._last = self._clock()

    def lap(self, stage: str) -> None:
        if self._sessions:
            now = self._clock()
            self._step[stage] += (now - self._last) * 1e6
            self._last = now

    def end_step(self, engine_us: Mapping[str, float]) -> None:
        """A step is complete: its laps, and the engine's own stages, become one sample each."""
        if not self._sessions:
            return
        step, self._step = self._step, defaultdict(float)
        for session in self._sessions:
            session.steps += 1
            for stage, microseconds in (*step.items(), *engine_us.items()):
                session.samples[stage].append(microseconds)

    def next_deadline(self) -> float | None:
        return min((session.deadline for session in self._sessions), default=None)

    def finished(self) -> Iterator[tuple[int, ProfileDone]]:
        """Answers that are complete or out of time, by front; each is returned once."""
        if not self._sessions:
            return
        now = self._clock()
        for session in list(self._sessions):
            if session.steps >= session.start.steps or now >= session.deadline:
                self._sessions.remove(session)
                yield session.front, session.done()

    def drop_front(self, front: int) -> None:
        self._sessions = [session for session in self._sessions if session.front != front]
