"""What becomes of sequences that have lost their worker: judged if it died, then sent to another.

A sequence goes on where it was: it is resubmitted with the output that the front has. One that is not known
to be harmless is sent as a suspect. Knows no admission of new requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from worker.answers import Answer, AnswerFinished
from worker.connection import WorkerConnection
from worker.generation import Generation
from worker.homes import Homes
from worker.messages import FinishReason, Submit
from worker.options import PoolOptions
from worker.orphans import Orphan, Orphans
from worker.placement import Placement
from worker.reports import WorkerDeath, WorkerReport, WorkerState
from worker.roster import Roster
from worker.suspects import Suspicion


class Recovery:
    """Of one front."""

    def __init__(
        self,
        roster: Roster,
        homes: Homes,
        placement: Placement,
        options: PoolOptions,
        cancel: Callable[[Generation, list[Answer]], None],
        logger: structlog.typing.FilteringBoundLogger,
    ) -> None:
        """`cancel` takes answers back from wherever they are."""
        self.orphans = Orphans(options.orphan_wait_s)
        self._roster = roster
        self._homes = homes
        self._placement = placement
        self._max_deaths = options.max_deaths
        self._cancel = cancel
        self._log = logger

    def lost(self, connection: WorkerConnection) -> None:
        """A connection is over; whether its worker died may not be known yet."""
        for generation, answer in self._homes.lose(connection):
            self.orphans.add(generation, answer, (connection.worker, connection.generation))
        self.hear(self._roster.report(connection.worker))
        self.place()

    def hear(self, report: WorkerReport) -> None:
        """News of a worker, perhaps of a death that orphans wait to hear of."""
        for generation in self.orphans.places(report.index):
            if report.has_ended(generation):
                death = next((death for death in report.deaths if death.generation == generation), None)
                self.orphans.settle((report.index, generation), partial(self._judge, death=death))

    def ready(self, connection: WorkerConnection) -> None:
        """A worker takes sequences. If it is the same generation again, only the connection had broken,
        and nobody is to blame."""
        self.orphans.settle((connection.worker, connection.generation), lambda _orphan: None)
        self.place()

    def place(self) -> None:
        """Sends orphans to the workers there are."""
        if not self.orphans:
            return
        if self._roster.states() == {WorkerState.FAILED}:
            self.orphans.fail_all("the model's workers have failed")
        loads = {connection.worker: connection.load for connection in self._roster.ready()}
        if not loads:
            return
        for orphan in self.orphans.take_ready():
            generation = orphan.generation
            worker = self._placement.choose(loads, generation.prompt, generation.request.cache_salt)
            connection = self._roster.connection(worker)
            self._resubmit(connection, generation, orphan.answer)
            loads[worker] = connection.load

    def _judge(self, orphan: Orphan, death: WorkerDeath | None) -> None:
        answer = orphan.answer
        if answer.is_paused:
            return  # it held no slot, so it cannot have done it
        if answer.suspicion is None:
            answer.suspicion = Suspicion()
        verdict = answer.suspicion.worker_died(death, self._max_deaths)
        if verdict is None:
            return
        generation = orphan.generation
        self._log.error("request_given_up", request_id=generation.request.request_id, reason=verdict)
        remaining = [each for each in generation.answers if not each.is_over]
        self._cancel(generation, remaining)
        for each in remaining:
            generation.end(each, AnswerFinished(FinishReason.FAULT, verdict))

    def _resubmit(self, connection: WorkerConnection, generation: Generation, answer: Answer) -> None:
        request, suspicion = generation.request, answer.suspicion
        generation.was_resubmitted = True
        self._homes.settle(connection, generation, answer)
        if suspicion is not None:
            suspicion.submitted()
        connection.send(
            Submit(
                answer.key,
                request.request_id,
                generation.prompt,
                answer.sampling(request.sampling, has_prompt_logprobs=generation.has_prompt_logprobs),
                request.max_tokens,
                priority=request.priority,
                cache_salt=request.cache_salt,
                time_left_s=generation.time_left_s(),
                output=answer.output(),
                is_resubmission=True,
                is_suspect=suspicion is not None and suspicion.is_suspect,
            )
        )
