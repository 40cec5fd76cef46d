"""AnswerDelta to the messages of vllm.grpc.engine: chunks with what is new, then one Complete per answer.

As that protocol's own server does: counts in a chunk are the chunk's, the gateway adds them up; a Complete
at the end of a stream repeats the last chunk's tokens, and without streaming holds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from smg_grpc_proto import vllm_engine_pb2 as vllm

from service.rpc.answers import AnswerDelta, Finish
from service.rpc.validation import GenerateInput
from worker.client import TokenLogprobs

_FINISH_NAMES = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORTED: "abort"}


@dataclass(slots=True)
class _Gathered:
    """An answer that is not streamed, so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None


class VllmEncoder:
    """Makes the messages of one request."""

    def __init__(self, request: GenerateInput, is_streaming: bool) -> None:
        self._prompt_ids = request.prompt.ids
        self._sampling = request.sampling
        self._gathered = None if is_streaming else [_Gathered() for _ in range(request.n)]

    def responses(self, delta: AnswerDelta) -> list[vllm.GenerateResponse]:
        """The messages that a delta makes: none, a chunk, a Complete, or both. Never a chunk without
        tokens: the gateway takes the first chunk for the first token."""
        if self._gathered is None:
            messages = []
            if delta.tokens or delta.prompt_logprobs is not None:
                messages.append(vllm.GenerateResponse(chunk=self._chunk(delta)))
            if delta.finish is not None:
                messages.append(self._complete(delta, delta.tokens, delta.logprobs, None))
            return messages
        whole = self._gathered[delta.index]
        whole.tokens += delta.tokens
        whole.logprobs += delta.logprobs or ()
        whole.prompt_logprobs = delta.prompt_logprobs or whole.prompt_logprobs
        if delta.finish is None:
            return []
        return [self._complete(delta, whole.tokens, whole.logprobs, whole.prompt_logprobs)]

    def _chunk(self, delta: AnswerDelta) -> vllm.GenerateStreamChunk:
        chunk = vllm.GenerateStreamChunk(
            token_ids=delta.tokens,
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(delta.tokens),
            cached_tokens=delta.cached_tokens,
            index=delta.index,
        )
        if delta.logprobs:
            chunk.output_logprobs.CopyFrom(self._output_logprobs(delta.tokens, delta.logprobs))
        if delta.prompt_logprobs is not None:
            chunk.input_logprobs.CopyFrom(self._input_logprobs(delta.prompt_logprobs))
        return chunk

    def _complete(
        self,
        delta: AnswerDelta,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        prompt_logprobs: Sequence[TokenLogprobs] | None,
    ) -> vllm.GenerateResponse:
        assert delta.finish is not None
        complete = vllm.GenerateComplete(
            output_ids=tokens,
            finish_reason=_FINISH_NAMES[delta.finish],
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(tokens),
            cached_tokens=delta.cached_tokens,
            index=delta.index,
        )
        if logprobs:
            complete.output_logprobs.CopyFrom(self._output_logprobs(tokens, logprobs))
        if prompt_logprobs is not None:
            complete.input_logprobs.CopyFrom(self._input_logprobs(prompt_logprobs))
        if isinstance(delta.matched_stop, str):
            complete.matched_stop_str = delta.matched_stop
        elif delta.matched_stop is not None:
            complete.matched_token_id = delta.matched_stop
        return vllm.GenerateResponse(complete=complete)

    def _output_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> vllm.OutputLogProbs:
        return vllm.OutputLogProbs(
            token_logprobs=[entry.logprob for entry in logprobs],
            token_ids=tokens,
            top_logprobs=[_top(entry) for entry in logprobs] if self._sampling.logprobs else (),
        )

    def _input_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> vllm.InputLogProbs:
        """The first prompt token has none: an entry without a value."""
        values = [vllm.InputTokenLogProb(value=entry.logprob) for entry in logprobs]
        top = [_top(entry) for entry in logprobs]
        return vllm.InputLogProbs(
            token_logprobs=[vllm.InputTokenLogProb(), *values],
            token_ids=self._prompt_ids,
            top_logprobs=[vllm.TopLogProbs(), *top] if self._sampling.prompt_logprobs else (),
        )


def _top(entry: TokenLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids)
