"""Steps under way: what each has enqueued, and how its results are read once they have arrived.

A ring of flights, each with pinned memory for what goes to the device and what comes back. Knows no model.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from engine.cuda.device import Event, Stream
from engine.cuda.ledger import Ledger
from engine.cuda.memory import Arena
from engine.cuda.owned import Owned
from engine.cuda.regions import HostRegion, Region
from engine.cuda.work import PromptSpan, SampleWork, StepWork
from engine.interface import StepHandle, StepResult, TokenLogprobs
from kernels.sampling import RowStatus

SLOT_FAULT = "the logits are not finite, or penalties, bias and min_tokens leave no token to choose from"


class Flight:
    """One place of the ring."""

    def __init__(self, staging: Region, results: Region) -> None:
        with Owned() as made:
            self.staging = made.add(HostRegion(staging))
            self.results = made.add(HostRegion(results))
            self.begun = made.add(Event(timing=True))
            self.done = made.add(Event(timing=True))
            made.release()
        self.step: CudaStep | None = None
        """Whose memory this is, until its results are read."""
        self.uses = 0

    def close(self) -> None:
        with Owned() as made:
            for part in (self.staging, self.results, self.begun, self.done):
                made.add(part)


class Flights:
    """The ring."""

    def __init__(self, count: int, staging: Region, results: Region) -> None:
        with Owned() as made:
            self._all = [made.add(Flight(staging, results)) for _ in range(count)]
            made.release()
        self._next = 0
        self._last: Flight | None = None

    def take(self) -> Flight:
        """The place for the next step. Waits only if a step so long ago has not been collected."""
        flight = self._all[self._next]
        self._next = (self._next + 1) % len(self._all)
        if flight.step is not None:
            flight.step.settle()
        flight.uses += 1
        return flight

    def enqueued(self, flight: Flight) -> Flight | None:
        """Remembers the step just enqueued; returns that of the one before."""
        before, self._last = self._last, flight
        return before

    def close(self) -> None:
        with Owned() as made:
            while self._all:
                made.add(self._all.pop())


class CudaStep(StepHandle):
    """A step that has been enqueued."""

    def __init__(self, flight: Flight, before: Flight | None, work: StepWork, ledger: Ledger) -> None:
        """before: the step before this one's; its end is this one's earliest beginning."""
        self._flight = flight
        self._before = before
        self._before_uses = 0 if before is None else before.uses
        self._work = work
        self._ledger = ledger
        self._generations = {slot: ledger.generation(slot) for slot in work.sampled_slots}
        self._result: StepResult | None = None
        flight.step = self

    def is_done(self) -> bool:
        return self._result is not None or self._flight.done.is_done()

    def result(self) -> StepResult:
        self.settle()
        assert self._result is not None
        return self._result

    def settle(self) -> None:
        """Waits, and reads the results out of the flight's memory."""
        if self._result is not None:
            return
        self._flight.done.synchronize()
        self._result = result = StepResult(slots=[], tokens=[], stopped=[])
        result.stage_us["step"] = self._flight.done.milliseconds_since(self._flight.begun) * 1e3
        if self._before is not None and self._before.uses == self._before_uses:
            result.stage_us["idle"] = max(0.0, self._flight.begun.milliseconds_since(self._before.done) * 1e3)
        prefill = self._work.prefill
        if prefill is not None and prefill.first_tokens is not None:
            self._read("first", prefill.first_tokens, result)
        if self._work.decode is not None:
            self._read("decode", self._work.decode, result)
        if prefill is not None:
            for span in prefill.prompt_spans:
                result.prompt_logprobs[span.slot] = self._prompt(span)
        self._flight.step = None

    def _read(self, group: str, rows: SampleWork, result: StepResult) -> None:
        results = self._flight.results
        count = len(rows.slots)
        tokens = results[f"{group}.tokens"][:count].tolist()
        statuses = results[f"{group}.statuses"][:count].tolist()
        for slot, token, status in zip(rows.slots, tokens, statuses, strict=True):
            if status in (RowStatus.TOKEN, RowStatus.STOPPED):
                result.slots.append(slot)
                result.tokens.append(token)
                result.stopped.append(status == RowStatus.STOPPED)
            elif status == RowStatus.FAULT:
                result.faults[slot] = SLOT_FAULT
            if status in (RowStatus.STOPPED, RowStatus.FAULT):
                self._ledger.ended(slot, self._generations[slot])
        if rows.key.logprobs:
            for row, (slot, status) in enumerate(zip(rows.slots, statuses, strict=True)):
                if status in (RowStatus.TOKEN, RowStatus.STOPPED) and results[f"{group}.ranks"][row] > 0:
                    result.logprobs[slot] = _logprobs(results, group, row)

    def _prompt(self, span: PromptSpan) -> list[TokenLogprobs]:
        rows = range(span.first, span.first + span.count)
        return [_logprobs(self._flight.results, "prompt", row) for row in rows]


class Collector:
    """Enqueues the copies that bring results back."""

    def __init__(self, region: Region, device: Arena, stream: Stream) -> None:
        self._region = region
        self._device = device.address
        self._stream = stream

    def sampled(self, group: str, rows: SampleWork, host: HostRegion) -> None:
        last = "top_logprobs" if rows.key.logprobs else "statuses"
        self._copy(host, *self._region.span(f"{group}.tokens", f"{group}.{last}"))

    def prompt(self, entries: int, host: HostRegion) -> None:
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
            place = self._region.layout.reservations[f"prompt.{name}"]
            self._copy(host, place.offset, place.bytes // place.shape[0] * entries)

    def _copy(self, host: HostRegion, offset: int, size: int) -> None:
        if size:
            self._stream.copy_to_host(host.address + offset, self._device + offset, size)


def _logprobs(results: HostRegion, group: str, row: int) -> TokenLogprobs:
    ids: NDArray[Any] = results[f"{group}.top_ids"][row]
    count = int((ids >= 0).sum())
    return TokenLogprobs(
        logprob=float(results[f"{group}.logprobs"][row]),
        rank=int(results[f"{group}.ranks"][row]),
        top_ids=tuple(ids[:count].tolist()),
        top_logprobs=tuple(results[f"{group}.top_logprobs"][row][:count].tolist()),
    )
