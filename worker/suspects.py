"""Finds the request that kills workers, without failing the innocent ones that ran beside it.

Every request that runs on a worker when it dies becomes a *suspect* and is submitted anew, by whichever
front it belongs to, to another worker or to the next generation. There:

- Suspects start one at a time. The worker announces each with TrialStarted before its first step.
- A suspect has proved itself once it has been given `proof_tokens` new tokens (or has ended); it goes on as
  an ordinary request and the next suspect's trial starts.
- While suspects wait, new requests wait behind them: whoever else runs has proved itself.

So if the worker dies during a trial, the suspect on trial was running at both deaths, and nobody else alive
is as likely to have caused the second. It fails alone, with FAULT, and the others are suspects again. A
suspect that still waited for its trial has nothing to do with the second death.
A death by SIGKILL or SIGTERM comes from outside as a rule; it convicts only at the second time on trial,
so that no stream is lost to an operator (or a test) who kills twice in a row.

How many tokens are proof: a sequence that kills its worker at token t has had all tokens delivered but
those of steps under way, so after resubmission it gets at most pipeline_depth − 1 tokens before it kills
again. One that kills at random, and not at a certain token, can pass; max_deaths bounds that.

Here is the rule as a front applies it; quarantine.py is the worker's half.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface import EngineCapacity
from worker.reports import WorkerDeath


def proof_tokens(capacity: EngineCapacity) -> int:
    """New tokens after which a suspect has proved itself."""
    return capacity.pipeline_depth


@dataclass(slots=True)
class Suspicion:
    """One sequence's part in the deaths of its workers."""

    deaths: int = 0
    """Of workers that it was running on."""
    is_suspect: bool = False
    _waits_for_trial: bool = False
    _tokens_to_prove: int = 0
    """More than 0 while on trial."""
    _was_killed_on_trial: bool = False

    def submitted(self) -> None:
        """The sequence was sent to a worker."""
        self._waits_for_trial = self.is_suspect
        self._tokens_to_prove = 0

    def trial_started(self, proof: int) -> None:
        self._waits_for_trial = False
        self._tokens_to_prove = proof

    def halted(self) -> None:
        """The worker was told to put it aside: no trial goes on."""
        self._tokens_to_prove = 0

    def got_tokens(self, count: int) -> None:
        if self._tokens_to_prove > 0:
            self._tokens_to_prove -= count
            if self._tokens_to_prove <= 0:
                self.is_suspect = False
                self._was_killed_on_trial = False

    def worker_died(self, death: WorkerDeath | None, max_deaths: int) -> str | None:
        """Why the sequence must fail, or None: it may go on, as a suspect. `death`: None if unknown."""
        if self._waits_for_trial:
            return None
        self.deaths += 1
        was_on_trial, self._tokens_to_prove = self._tokens_to_prove > 0, 0
        if self.deaths >= max_deaths:
            return f"the workers that this request ran on died {self.deaths} times; it is given up"
        if was_on_trial:
            if self._was_killed_on_trial or not (death is not None and death.was_killed):
                return "this request was running both times when its worker died; it is given up"
            self._was_killed_on_trial = True
        self.is_suspect = True
        return None
