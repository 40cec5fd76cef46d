"""AnswerDelta to the messages of slipstream.v1. The hot path: one message per stream and step."""

from __future__ import annotations

from collections.abc import Sequence

from protos.slipstream.v1 import inference_pb2
from service.rpc.answers import AnswerDelta, AnswerTimings
from service.rpc.validation import GenerateInput
from service.text import TextTokenizer
from worker.client import TokenLogprobs


class ResponseEncoder:
    """Makes the messages of one request."""

    __slots__ = ("_echo_ids", "_echo_text", "_prompt_ids", "_prompt_tokens", "_request_id", "_tokenizer")

    def __init__(self, request: GenerateInput, tokenizer: TextTokenizer) -> None:
        self._request_id = request.request_id
        self._tokenizer = tokenizer
        self._prompt_ids = request.prompt.ids
        self._prompt_tokens = len(request.prompt.ids)
        self._echo_ids: list[int] = []
        self._echo_text = ""
        if request.echo:
            self._echo_ids = request.prompt.ids
            text = request.prompt.text
            self._echo_text = tokenizer.decode(request.prompt.ids) if text is None else text

    def response(self, delta: AnswerDelta) -> inference_pb2.GenerateResponse:
        """One message of the stream."""
        message = inference_pb2.GenerateResponse(
            request_id=self._request_id,
            index=delta.index,
            text=delta.text,
            token_ids=delta.tokens,
            usage=inference_pb2.Usage(
                prompt_tokens=self._prompt_tokens,
                cached_tokens=delta.cached_tokens,
                completion_tokens=delta.completion_tokens,
            ),
        )
        if delta.is_first and self._echo_ids:
            message.text = self._echo_text + delta.text
            message.token_ids[:] = self._echo_ids + delta.tokens
        if delta.logprobs:
            message.logprobs.extend(self._logprobs(delta.tokens, delta.logprobs))
        if delta.prompt_logprobs:
            message.prompt_logprobs.extend(self._logprobs(self._prompt_ids[1:], delta.prompt_logprobs))
        if delta.finish is not None:
            self._finish(message, delta)
        return message

    def _finish(self, message: inference_pb2.GenerateResponse, delta: AnswerDelta) -> None:
        message.finish_reason = delta.finish  # type: ignore[assignment]
        if isinstance(delta.matched_stop, str):
            message.matched_stop.text = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_stop.token_id = delta.matched_stop
        if delta.timings is not None:
            message.timings.CopyFrom(_timings(delta.timings))

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> list[inference_pb2.TokenLogprobs]:
        """`tokens` and `logprobs` run in parallel."""
        return [
            inference_pb2.TokenLogprobs(
                token=self._logprob(token, entry.logprob),
                rank=entry.rank,
                top=[
                    self._logprob(top, logprob)
                    for top, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            )
            for token, entry in zip(tokens, logprobs, strict=True)
        ]

    def _logprob(self, token: int, logprob: float) -> inference_pb2.Logprob:
        return inference_pb2.Logprob(
            token_id=token, logprob=logprob, token=self._tokenizer.token_bytes(token)
        )


class CompletionBuilder:
    """Puts a stream's messages together into the one answer of Complete."""

    def __init__(self, request: GenerateInput) -> None:
        self._texts: list[list[str]] = [[] for _ in range(request.n)]
        self._response = inference_pb2.CompleteResponse(
            request_id=request.request_id,
            completions=[inference_pb2.Completion(index=i) for i in range(request.n)],
            usage=inference_pb2.Usage(prompt_tokens=len(request.prompt.ids)),
        )
        self._counts = [0] * request.n

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        index = message.index
        completion = self._response.completions[index]
        self._texts[index].append(message.text)
        completion.token_ids.extend(message.token_ids)
        completion.logprobs.extend(message.logprobs)
        self._response.prompt_logprobs.extend(message.prompt_logprobs)
        self._counts[index] = message.usage.completion_tokens
        if index == 0:
            self._response.usage.cached_tokens = message.usage.cached_tokens
        if message.finish_reason:
            completion.finish_reason = message.finish_reason
            completion.timings.CopyFrom(message.timings)
        if message.HasField("matched_stop"):
            completion.matched_stop.CopyFrom(message.matched_stop)

    def build(self) -> inference_pb2.CompleteResponse:
        for completion, texts in zip(self._response.completions, self._texts, strict=True):
            completion.text = "".join(texts)
        self._response.usage.completion_tokens = sum(self._counts)
        return self._response


def _timings(timings: AnswerTimings) -> inference_pb2.Timings:
    return inference_pb2.Timings(
        queue=timings.queue,
        first_token=timings.first_token,
        total=timings.total,
        per_token=timings.per_token,
        preemptions=timings.preemptions,
    )
