"""The scheduler under thousands of random arrivals, aborts, pauses, deadlines and faults.

The harness checks, after every step, that pages and slots are accounted for, that the engine was asked
to read nothing but what the right sequence wrote, and that every stream gets its own tokens in order.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from scheduler_harness import VOCABULARY, Harness

from engine.simulated import SimulatedOptions
from worker.messages import FinishReason, RejectReason

FRONTS = (1, 2, 3)
ARRIVALS = 120


def random_harness(rng: random.Random) -> Harness:
    """Small machines: the less room, the more happens."""
    slots = rng.choice((1, 2, 3, 5, 8))
    pages = rng.choice((5, 6, 8, 12, 20, 40))
    fault_rate = rng.choice((0, 0, 0.002))
    options = SimulatedOptions(
        slots=slots,
        pages=pages,
        max_sequence_length=300,
        max_step_tokens=rng.choice((slots + 7, slots + 20, 64, 100, 256, 1024)),
        pipeline_depth=rng.choice((1, 2, 3)),
        prefix_cacheable=rng.random() < 0.8,
        stop_one_in=rng.choice((0, 20, 60)),
        fault=lambda step, slot: "it failed" if fault_rate and rng.random() < fault_rate else None,
    )
    return Harness(
        options,
        max_queued=rng.choice((10, 1000)),
        prefix_caching=rng.random() < 0.9,
        prefill_policy=rng.choice(("together", "together", "alternating")),
        prefill_tokens_beside_decodes=rng.choice((None, None, 16, 64)),
    )


class Traffic:
    """Random requests, and everything that may befall them."""

    def __init__(self, harness: Harness, rng: random.Random) -> None:
        self.harness = harness
        self.rng = rng
        self.n_arrivals = 0
        self.rejected: list[RejectReason] = []
        make = np.random.default_rng(rng.randrange(2**32))
        self.prefixes = [make.integers(0, VOCABULARY, n) for n in (0, 40, 64, 130, 200)]
        self.is_talkative = rng.random() < 0.4
        """Short questions, long answers: what makes pages run out."""

    def arrive(self) -> None:
        rng = self.rng
        prefix = rng.choice(self.prefixes)[: rng.choice((64, 128, 500))]
        tail = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 3, 30, 64, 90)))]
        prompt = np.concatenate((prefix, tail)).astype(np.int32)[: 40 if self.is_talkative else 290]
        # Some ask for what can never fit.
        lengths = (60, 130, 200) if self.is_talkative else (1, 2, 5, 20, 64, 100)
        max_tokens = min(rng.choice(lengths), 301 - len(prompt))
        self.n_arrivals += 1
        key = self.harness.submit(
            prompt,
            max_tokens,
            front=rng.choice(FRONTS),
            n=rng.choice((1, 1, 1, 1, 2, 4)),
            priority=rng.choice((0, 0, 0, 0, 1, 2, -1)),
            cache_salt=rng.choice(("", "", "", "salt")),
            seed=rng.randrange(2**64),
            time_left_s=rng.choice((None,) * 9 + (0.0, 0.05, 1.0)),
            logprobs=rng.choice((None, None, None, 0, 2)),
            prompt_logprobs=rng.choice((None, None, None, None, None, 1)),
            stop_token_ids=frozenset(rng.choice(((), (7,), (7, 8, 9)))),
            min_tokens=rng.choice((0, 0, 3)),
        )
        if not isinstance(key, int):
            self.rejected.append(key.reason)

    def live(self) -> list[tuple[int, int]]:
        return [name for name, s in self.harness.streams.items() if s.finished is None and not s.is_silenced]

    def befall(self) -> None:
        """One mishap."""
        harness, rng = self.harness, self.rng
        live = self.live()
        if not live:
            return
        front, key = rng.choice(live)
        match rng.choice(
            ("pause", "pause", "pause", "resume", "resume", "cancel", "abort", "unknown", "drop")
        ):
            case "pause":
                harness.pause(key, front=front)
            case "resume":
                for front, key in live:
                    harness.pause(key, paused=False, front=front)
            case "cancel":
                harness.cancel(front, [key, key + 1, 10**9])
            case "abort":
                harness.abort(harness.streams[front, key].submit.request_id)
            case "unknown":
                assert not harness.abort(f"unknown-{rng.random()}")
            case "drop":
                if rng.random() < 0.1:
                    harness.drop_front(front)
        harness.check()

    def run(self, arrivals: int) -> None:
        """Bursts and lulls, then quiet until all is over."""
        harness, rng = self.harness, self.rng
        while self.n_arrivals < arrivals:
            for _ in range(rng.choice((0, 0, 0, 0, 1, 5))):
                self.arrive()
            if rng.random() < 0.15:
                self.befall()
            for _ in range(rng.choice((1, 2, 10))):
                harness.turn()
                harness.clock.now += rng.choice((0.0, 0.001, 0.02))
        for front, key in self.live():
            harness.pause(key, paused=False, front=front)
        harness.run()


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_gets_its_own_tokens_and_ends_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    harness = random_harness(rng)
    traffic = Traffic(harness, rng)
    traffic.run(ARRIVALS)
    harness.check_all_over()
    assert set(traffic.rejected) <= {RejectReason.QUEUE_FULL, RejectReason.TOO_LONG}
    accepted = [s for s in harness.streams.values() if not s.is_silenced]
    stats = harness.scheduler.stats()
    assert sum(stats.finished.values()) == len(harness.streams)
    assert sum(stats.rejected.values()) == len(traffic.rejected)
    assert sum(len(s.tokens) for s in accepted) <= stats.generated_tokens


def test_random_traffic_meets_every_situation() -> None:
    """The test above would prove little if nothing ever happened in it."""
    preempted = reused = 0
    reasons: set[FinishReason | None] = set()
    for seed in range(12):
        rng = random.Random(seed)
        harness = random_harness(rng)
        Traffic(harness, rng).run(40)
        stats = harness.scheduler.stats()
        preempted += stats.preemptions
        reused += stats.prefix_hits
        reasons |= {stream.finished for stream in harness.streams.values()}
    assert preempted > 50
    assert reused > 1000
    assert reasons >= {
        FinishReason.STOP_TOKEN,
        FinishReason.LENGTH,
        FinishReason.ABORTED,
        FinishReason.DEADLINE,
        FinishReason.FAULT,
    }
