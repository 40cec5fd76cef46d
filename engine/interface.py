"""The contract between the scheduler and an engine: a step plan in, sampled tokens out.

An engine holds *slots* (one sequence's state each) and *pages* (64 tokens of keys and values each).
The caller owns both: it hands out slot and page numbers, and the engine does what the plan says.
Nothing here knows requests, RPCs, queues, numpy kernels or CUDA.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE = 64
"""Tokens per KV page."""

MAX_LOGPROBS = 20
"""Most alternatives for which log-probabilities can be reported."""

IntArray = NDArray[np.int32]

Progress = Callable[[str, float], None]
"""Called while loading with a stage's name and how far loading is in all, 0 to 1."""


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


class EngineError(Exception):
    """The engine cannot go on; its process should end and be started anew."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence's tokens are chosen; every field is set (defaults are resolved before).

    Processing order: penalties and bias on the raw logits, then temperature, then top-k, top-p and
    min-p, then one draw. Log-probabilities are of the raw logits, before all of it.
    """

    temperature: float = 1.0
    """0: the most likely token, the lowest id among equals."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Counts tokens of prompt and output."""
    presence_penalty: float = 0.0
    """Counts tokens of the output."""
    frequency_penalty: float = 0.0
    """Counts tokens of the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Unsigned 64-bit. The draw of output token i depends on (seed, i) alone."""
    stop_token_ids: frozenset[int] = frozenset()
    """Sampling one of these finishes the sequence. Includes the end-of-sequence tokens."""
    min_tokens: int = 0
    """stop_token_ids cannot be sampled (logit −inf) before so many output tokens."""
    logprobs: int | None = None
    """Alternatives to report besides the sampled token; None reports nothing."""
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A sequence takes a slot, new or resumed. Resets all state of the slot."""

    slot: int
    sampling: Sampling
    prompt: IntArray
    """The request's prompt, int32 [n_prompt], for the penalties."""
    output: IntArray
    """Tokens already generated (a resumed sequence), int32 [n_output]. Output indices go on from here."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of one sequence to run in one ragged pass with the other chunks of the plan.

    KV for positions start .. start + len(tokens) − 1 is written to the slot's pages; earlier
    positions are read from them (cached prefix or earlier chunks).
    """

    slot: int
    tokens: IntArray
    """int32 [n], n ≥ 1."""
    start: int
    """Position of tokens[0]."""
    is_last: bool
    """Sample the sequence's next token from the last row; from the next plan on, the slot may decode."""


@dataclass(frozen=True, slots=True)
class PageAssignment:
    """Entry `index` of the slot's block table becomes `page`: it holds positions 64·index … 64·index+63."""

    slot: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work, in this order: releases, starts, pages, then prefills and decodes together.

    A slot is in at most one of `prefills` and `decodes`. A decode row feeds the slot's last sampled
    token, which the engine itself remembers, at the slot's next position, which it advances; so a plan
    can be enqueued before the previous step's tokens have been read. A decode row of a slot that has
    sampled a stop token in a step still under way is inert: it yields no token and writes no KV.
    """

    step: int
    releases: tuple[int, ...] = ()
    """Slots whose sequences are over; recurrent state may go. Their pages belong to the caller."""
    starts: tuple[SlotStart, ...] = ()
    pages: tuple[PageAssignment, ...] = ()
    prefills: tuple[PrefillChunk, ...] = ()
    decodes: tuple[int, ...] = ()
    """Slots that generate one token each."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural, of the raw logits) at one position."""

    logprob: float
    """Of the token that stands there."""
    rank: int
    """1: the most likely."""
    top_ids: tuple[int, ...] = ()
    """Most likely first; ties by lower id."""
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. The three lists run in parallel, one entry per sampled token."""

    slots: list[int]
    tokens: list[int]
    stopped: list[bool]
    """The token is one of the sequence's stop_token_ids: the slot is inert from now on."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By slot, where asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By slot, for the tokens of this step's chunk: entry i is the log-probability of the chunk's token
    i given all before it. Position 0 of a prompt has none, so a chunk with start 0 yields one fewer."""
    faults: dict[int, str] = field(default_factory=dict)
    """By slot: this sequence alone failed (non-finite logits, say) and yields nothing more."""
    stage_us: dict[str, float] = field(default_factory=dict)
    """Microseconds by stage, where the engine measures them."""


class StepHandle(ABC):
    """A step under way."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether result() would return at once."""

    @abstractmethod
    def result(self) -> StepResult:
        """Waits for the step. Raises EngineError if the engine is broken. To be called once."""


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What the caller may hand out."""

    slots: int
    """Sequences that can be resident at once: slot numbers 0 … slots − 1."""
    pages: int
    """KV pages: page numbers 0 … pages − 1."""
    max_sequence_length: int
    """Most tokens of prompt and output together."""
    max_step_tokens: int
    """Most prefill tokens plus decode rows in one plan."""
    pipeline_depth: int
    """Steps worth having under way at once: 1 for an engine that computes inside execute()."""
    prefix_cacheable: bool
    """Whether pages alone carry a prefix (false for models with recurrent state)."""
    prefill_tokens_beside_decodes: int | None = None
    """Most prompt tokens in a step that also decodes which leave running streams about their pace (twice the
    time of a step without them); None: the whole budget does no harm."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is running, for people and for GetModelInfo."""

    engine: str
    """"cuda", "reference" or "simulated"."""
    architecture: str
    device: str
    weight_dtype: str
    kv_dtype: str
    parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    memory_plan: dict[str, int] = field(default_factory=dict)
    """Bytes by purpose."""
    fallbacks: tuple[str, ...] = ()
    """What runs in a slower way than asked for, and why."""
    versions: dict[str, str] = field(default_factory=dict)


class Engine(ABC):
    """Runs one model. Made by engine.factory.load_engine; used from one thread."""

    info: EngineInfo
    capacity: EngineCapacity

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepHandle:
        """Enqueues a step and returns at once where the device allows it. Steps run in order.

        Raises EngineError if the engine is broken, ValueError if the plan breaks the contract.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees everything. Idempotent."""
