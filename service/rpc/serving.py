"""What a front serves at this moment: the model, once a worker has loaded it, and whether it still admits.

The one piece of state that all servicers of a front share. Knows no RPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc

from service.front_instruments import FrontInstruments
from service.rpc.errors import RpcError, retry_later
from service.rpc.health_states import Condition
from service.rpc.prompts import PromptReader
from service.rpc.sampling import SamplingLimits
from service.rpc.validation import RequestValidator
from service.text import TextTokenizer
from worker.client import EngineCapacity, EngineInfo, WorkerPool

_Result = TypeVar("_Result")

INLINE_BYTES = 4096
"""Requests above this size are read off the event loop: tokenizing and preparing stop strings run at 1 to 3
MB/s, so that this many bytes stop every other stream for a few milliseconds at most."""

READER_THREADS = 2
"""Long prompts read at the same time; more would only take cores from the event loop."""
MAX_READING_BYTES = 256 * 2**20
"""Of prompts that are read by a thread or wait for one: they are held in memory."""
READING_RETRY_S = 1.0

LOADING_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model, as requests see it."""

    name: str
    path: Path
    """Its files: a folder, or one .gguf file."""
    tokenizer: TextTokenizer
    info: EngineInfo
    capacity: EngineCapacity
    max_queued: int
    """Requests that may wait, per worker."""
    limits: SamplingLimits
    validator: RequestValidator

    @classmethod
    def of(
        cls,
        name: str,
        path: Path,
        tokenizer: TextTokenizer,
        info: EngineInfo,
        capacity: EngineCapacity,
        max_queued: int,
    ) -> ServedModel:
        """Takes tens of milliseconds: it looks at every token of the vocabulary."""
        limits = SamplingLimits.of(info.vocab_size, tokenizer.eos_token_ids, tokenizer.generation_defaults)
        reader = PromptReader(tokenizer, info.vocab_size, capacity.max_sequence_length)
        validator = RequestValidator(name, reader, limits, capacity.max_sequence_length)
        return cls(name, path, tokenizer, info, capacity, max_queued, limits, validator)


class Serving:
    """Shared by the servicers of one front; used from its event loop."""

    def __init__(self, pool: WorkerPool, workers: int, metrics: FrontInstruments) -> None:
        """`workers`: how many are configured; none is ready yet."""
        self.pool = pool
        self.metrics = metrics
        self.model: ServedModel | None = None
        """To be set when the first worker has said what it runs."""
        self.condition = Condition((False,) * workers)
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the condition has changed."""
        self.requests_open = 0
        """Requests for tokens under way, those still being validated included: what a drain waits for."""
        self.on_request_over: Callable[[], None] = lambda: None
        """Called after each request for tokens."""
        self._reading_bytes = 0
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="prompt-reader")

    def set_workers(self, ready: Sequence[bool], queue_has_room: bool) -> None:
        """By worker index, whether it can be reached; and whether one of them would admit a request now.
        To be called whenever either may have changed; cheap if neither has."""
        self._set(replace(self.condition, workers_ready=tuple(ready), queue_has_room=queue_has_room))

    def start_draining(self) -> None:
        """Stops admission; running requests go on."""
        self._set(replace(self.condition, is_draining=True))

    def _set(self, condition: Condition) -> None:
        if condition != self.condition:
            self.condition = condition
            self.on_change()

    def loaded(self) -> ServedModel:
        """Raises RpcError UNAVAILABLE until a model is loaded."""
        if self.model is None:
            raise retry_later(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded", LOADING_RETRY_S)
        return self.model

    def admitting(self) -> ServedModel:
        """Raises RpcError UNAVAILABLE while no new request is taken."""
        if self.condition.is_draining:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the server is draining and takes no new requests")
        return self.loaded()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request for tokens while it runs."""
        self.requests_open += 1
        try:
            yield
        finally:
            self.requests_open -= 1
            self.on_request_over()

    async def read(self, size: int, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """`function(*arguments)`, in a thread if the input's `size` in bytes would stop the event loop.

        Raises RpcError RESOURCE_EXHAUSTED if too much is being read already.
        """
        if size <= INLINE_BYTES:
            return function(*arguments)
        if self._reading_bytes + size > MAX_READING_BYTES:
            message = "too many long prompts are being read at once"
            raise retry_later(grpc.StatusCode.RESOURCE_EXHAUSTED, message, READING_RETRY_S)
        self._reading_bytes += size
        try:
            return await self.in_thread(function, *arguments)
        finally:
            self._reading_bytes -= size

    async def in_thread(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """`function(*arguments)` off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
