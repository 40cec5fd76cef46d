"""Generate and Complete over a scripted pool: what is streamed, message by message."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from protos.slipstream.v1 import inference_pb2 as pb
from tests.unit.rpc_harness import (
    Harness,
    ScriptedGeneration,
    answers_with,
    generate_request,
    piece,
    read_stream,
    rpc_server,
    run,
)
from worker.client import FinishReason, TokenLogprobs

STOP = pb.FINISH_REASON_STOP
LENGTH = pb.FINISH_REASON_LENGTH
ABORTED = pb.FINISH_REASON_ABORTED
EOS = 0
UNSPECIFIED = pb.FINISH_REASON_UNSPECIFIED


def test_a_stream_message_by_message(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request("hello there"))
            generation = await harness.pool.submitted()
            n_prompt = len(generation.request.prompt)
            a, b, c = (piece(harness.tokenizer, text) for text in (" river", " sea", " fox"))

            generation.start(cached_tokens=1)
            first = await call.read()
            assert (first.request_id, first.index, first.text, list(first.token_ids)) == ("r1", 0, "", [])
            assert (first.usage.prompt_tokens, first.usage.cached_tokens) == (n_prompt, 1)
            assert (first.usage.completion_tokens, first.finish_reason) == (0, UNSPECIFIED)

            generation.push(a)
            second = await call.read()
            assert (second.text, list(second.token_ids)) == (" river", a)
            assert second.usage.completion_tokens == len(a)

            generation.push(b)
            generation.push(c)
            third = await call.read()
            assert (third.text, list(third.token_ids)) == (" sea fox", b + c)
            assert (third.usage.prompt_tokens, third.usage.cached_tokens) == (n_prompt, 1)

            generation.push([EOS])
            generation.end(FinishReason.STOP_TOKEN)
            last = await call.read()
            assert (last.text, list(last.token_ids), last.finish_reason) == ("", [EOS], STOP)
            assert last.usage.completion_tokens == len(a + b + c) + 1
            assert not last.HasField("matched_stop")
            assert 0 < last.timings.first_token <= last.timings.total
            assert last.timings.queue > 0
            assert last.timings.per_token > 0
            assert await call.read() is grpc.aio.EOF
            assert await call.code() == grpc.StatusCode.OK
            assert generation.closed.is_set()

    run(scenario())


def test_the_first_message_holds_tokens_that_are_there_already(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answers_with([50, 51])
            messages, code, _ = await read_stream(harness.inference.Generate(generate_request()))
            assert code == grpc.StatusCode.OK
            assert [list(message.token_ids) for message in messages] == [[50, 51]]
            assert messages[0].finish_reason == LENGTH

    run(scenario())


def test_token_id_0_is_a_token(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answers_with([0, 0])
            prompt = pb.GenerateRequest(tokens=pb.TokenIds(ids=[0]))
            prompt.sampling.ignore_eos = True
            prompt.sampling.stop_token_ids.append(0)
            messages, _, _ = await read_stream(harness.inference.Generate(prompt))
            assert list(messages[0].token_ids) == [0, 0]
            assert messages[0].usage.completion_tokens == 2
            assert harness.pool.generations[0].request.prompt == [0]
            assert harness.pool.generations[0].request.sampling.stop_token_ids == {0}

    run(scenario())


def test_no_replacement_character_for_one_still_to_come(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            text = "a😀é漢z"
            tokens = piece(harness.tokenizer, text)
            assert len(tokens) > len(text)
            call = harness.inference.Generate(generate_request())
            generation = await harness.pool.submitted()
            texts = []
            for i, token in enumerate(tokens):
                if i == len(tokens) - 1:
                    generation.end(FinishReason.LENGTH)
                generation.push([token])
                texts.append((await call.read()).text)
            assert "".join(texts) == text
            assert not any("\ufffd" in part for part in texts)

    run(scenario())


def test_a_stop_string_ends_the_answer_and_frees_the_slot(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request(stop=["STOP", "never"]))
            generation = await harness.pool.submitted()
            head, tail = piece(harness.tokenizer, "river ST"), piece(harness.tokenizer, "OP and more")
            generation.push(head)
            first = await call.read()
            assert first.text == "river "
            generation.push(tail)
            last = await call.read()
            assert (last.text, last.finish_reason, last.matched_stop.text) == ("", STOP, "STOP")
            assert len(last.token_ids) < len(tail)
            assert last.usage.completion_tokens == len(head) + len(last.token_ids)
            assert await call.read() is grpc.aio.EOF
            assert generation.finished_by_caller == {0}
            assert generation.closed.is_set()

    run(scenario())


def test_include_stop_returns_what_ended_it(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            tokens = piece(harness.tokenizer, "river.sea")
            harness.pool.on_submit = answers_with(tokens)
            answer = await harness.inference.Complete(generate_request(stop=["."], include_stop=True))
            assert answer.completions[0].text == "river."
            stop_token = piece(harness.tokenizer, "!")[0]
            harness.pool.on_submit = answers_with([*tokens, stop_token], FinishReason.STOP_TOKEN)
            answer = await harness.inference.Complete(
                generate_request(stop_token_ids=[stop_token], include_stop=True)
            )
            assert answer.completions[0].text == "river.sea!"
            assert answer.completions[0].matched_stop.token_id == stop_token
            answer = await harness.inference.Complete(generate_request(stop_token_ids=[stop_token]))
            assert answer.completions[0].text == "river.sea"
            assert list(answer.completions[0].token_ids) == [*tokens, stop_token]

    run(scenario())


def test_echo_puts_the_prompt_ahead(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            tokens = piece(harness.tokenizer, " sea")
            harness.pool.on_submit = answers_with(tokens)
            answer = await harness.inference.Complete(generate_request("the river", echo=True, n=2))
            prompt = list(harness.pool.generations[0].request.prompt)
            for completion in answer.completions:
                assert completion.text == "the river sea"
                assert list(completion.token_ids) == prompt + tokens
            by_ids = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt))
            by_ids.sampling.echo = True
            messages, _, _ = await read_stream(harness.inference.Generate(by_ids))
            assert messages[0].text == "the river sea"
            assert messages[0].usage.completion_tokens == len(tokens)

    run(scenario())


def test_several_answers_are_told_apart(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request(n=3, stop=["."]))
            generation = await harness.pool.submitted()
            assert generation.request.n == 3
            words = [piece(harness.tokenizer, word) for word in (" fox", " dog", " sea. and")]
            for index in (2, 0, 1):
                generation.start(index, cached_tokens=index)
                generation.push(words[index], index)
                message = await call.read()
                assert (message.index, message.usage.cached_tokens) == (index, index)
            assert (message.text, generation.finished_by_caller) == (" dog", {2})
            for index in (1, 0):
                generation.push(words[0], index)
                generation.end(FinishReason.LENGTH, index)
                message = await call.read()
                assert (message.index, message.finish_reason) == (index, LENGTH)
                assert message.usage.completion_tokens == len(words[index]) + len(words[0])
            assert await call.read() is grpc.aio.EOF

    run(scenario())


def test_complete_adds_up_all_answers(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            task = asyncio.ensure_future(harness.inference.Complete(generate_request(n=2)))
            generation = await harness.pool.submitted()
            words = [piece(harness.tokenizer, word) for word in (" fox", " dog")]
            for _ in range(3):
                for index in (0, 1):
                    generation.start(index, cached_tokens=2)
                    generation.push(words[index], index)
                    await asyncio.sleep(0)
            generation.end(FinishReason.LENGTH, 0)
            generation.push([EOS], 1)
            generation.end(FinishReason.STOP_TOKEN, 1)
            answer = await task
            assert [completion.text for completion in answer.completions] == [" fox" * 3, " dog" * 3]
            assert [completion.finish_reason for completion in answer.completions] == [LENGTH, STOP]
            assert answer.usage.cached_tokens == 2
            assert answer.usage.completion_tokens == 3 * len(words[0] + words[1]) + 1
            assert answer.usage.prompt_tokens == len(generation.request.prompt)
            assert answer.request_id == "r1"

    run(scenario())


def test_logprobs_run_beside_their_tokens(tiny_checkpoint: Path) -> None:
    entries = [TokenLogprobs(-0.5, 1, (60, 61), (-0.5, -1.5)), TokenLogprobs(-2.0, 7, (62, 63), (-0.1, -3.0))]

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request("hello there", logprobs=2, prompt_logprobs=1))
            generation = await harness.pool.submitted()
            prompt = list(generation.request.prompt)
            generation.start()
            generation.push_prompt_logprobs([TokenLogprobs(-1.0, 2, (9,), (-0.2,))] * (len(prompt) - 1))
            generation.push([60, 70], logprobs=entries)
            generation.end(FinishReason.LENGTH)
            message = await call.read()
            assert [entry.token.token_id for entry in message.prompt_logprobs] == prompt[1:]
            assert [(e.token.token_id, e.rank) for e in message.logprobs] == [(60, 1), (70, 7)]
            assert message.logprobs[1].token.logprob == pytest.approx(-2.0)
            assert [top.token_id for top in message.logprobs[1].top] == [62, 63]
            assert message.logprobs[0].token.token == harness.tokenizer.token_bytes(60)

    run(scenario())


def test_prompt_logprobs_come_in_the_first_message(tiny_checkpoint: Path) -> None:
    """A long prompt starts long before its last chunk is computed."""

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request("hello there", prompt_logprobs=0, echo=True))
            generation = await harness.pool.submitted()
            reader = asyncio.ensure_future(call.read())
            generation.start(cached_tokens=3)
            while generation.reads < 1:
                await asyncio.sleep(0.001)
            generation.push_prompt_logprobs([TokenLogprobs(-1.0, 2)] * (len(generation.request.prompt) - 1))
            generation.push([60])
            generation.end(FinishReason.LENGTH)
            message = await reader
            assert len(message.prompt_logprobs) == len(generation.request.prompt) - 1
            assert message.text.startswith("hello there")
            assert message.usage.cached_tokens == 3

    run(scenario())


def test_a_cut_answer_keeps_only_the_logprobs_of_its_tokens(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            tokens = [token for letter in "ab.cd" for token in piece(harness.tokenizer, letter)]

            def script(generation: ScriptedGeneration) -> None:
                generation.push(tokens, logprobs=[TokenLogprobs(-float(t), 1) for t in tokens])
                generation.end(FinishReason.LENGTH)

            harness.pool.on_submit = script
            answer = (await harness.inference.Complete(generate_request(stop=["."], logprobs=0))).completions[
                0
            ]
            assert answer.text == "ab"
            assert [entry.token.token_id for entry in answer.logprobs] == list(answer.token_ids) == tokens[:3]

    run(scenario())


def test_tokens_gather_while_the_client_does_not_read(tiny_checkpoint: Path) -> None:
    """Whatever piles up goes out in few messages, and no token is lost."""

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            call = harness.inference.Generate(generate_request())
            generation = await harness.pool.submitted()
            sent = 0
            # Until flow control stops the servicer: far fewer reads than pushes.
            stalled_since, last_reads = 0, -1
            while stalled_since < 50:
                generation.push([60 + sent % 7] * 5000)
                sent += 5000
                await asyncio.sleep(0.001)
                stalled_since = stalled_since + 1 if generation.reads == last_reads else 0
                last_reads = generation.reads
                assert sent < 20_000_000
            generation.end(FinishReason.LENGTH)
            received = messages = 0
            while (message := await call.read()) is not grpc.aio.EOF:
                received += len(message.token_ids)
                messages += 1
                assert message.usage.completion_tokens == received
            assert received == sent
            assert messages <= generation.reads

    run(scenario())


def test_sampling_defaults_and_zeroes(tiny_checkpoint: Path) -> None:
    async def submitted(harness: Harness, **sampling: object):
        await harness.inference.Complete(generate_request(**sampling))
        return harness.pool.generations[-1].request

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answers_with([60])
            info = await harness.inference.GetModelInfo(pb.GetModelInfoRequest())
            unset = (await submitted(harness)).sampling
            assert unset.temperature == info.default_sampling.temperature
            assert unset.top_p == info.default_sampling.top_p
            assert unset.stop_token_ids == set(info.eos_token_ids)
            assert (unset.logprobs, unset.prompt_logprobs) == (None, None)
            zero = (await submitted(harness, temperature=0.0, top_k=0, seed=0, logprobs=0)).sampling
            assert (zero.temperature, zero.top_k, zero.seed, zero.logprobs) == (0.0, 0, 0, 0)
            assert (await submitted(harness)).sampling.seed != (await submitted(harness)).sampling.seed
            assert (await submitted(harness, ignore_eos=True)).sampling.stop_token_ids == frozenset()
            assert (await submitted(harness, max_tokens=7)).max_tokens == 7
            most = await submitted(harness, max_tokens=2**32 - 1)
            assert most.max_tokens + len(most.prompt) == info.max_sequence_length

    run(scenario())


def test_a_long_prompt_does_not_stop_the_event_loop(tiny_checkpoint: Path) -> None:
    """While a prompt of a megabyte is being tokenized, other calls are answered."""

    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint, max_length=1_000_000) as harness:
            harness.pool.on_submit = answers_with([60])
            long = asyncio.ensure_future(
                harness.inference.Complete(generate_request("the river and the sea " * 45_000))
            )
            answered = 0
            while not long.done():
                await harness.inference.Detokenize(pb.DetokenizeRequest(ids=[60]))
                answered += 1
            assert (await long).usage.prompt_tokens > 100_000
            assert answered >= 3

    run(scenario())


def test_tokenize_and_back(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            text = "the river 😀"
            reply = await harness.inference.Tokenize(pb.TokenizeRequest(text=text))
            assert list(reply.ids) == harness.tokenizer.encode(text)
            assert b"".join(reply.tokens).decode() == text
            assert reply.max_sequence_length == 256
            back = await harness.inference.Detokenize(pb.DetokenizeRequest(ids=reply.ids))
            assert back.text == text
            chat = pb.Chat(messages=[pb.Message(role="user", content="hi")])
            reply = await harness.inference.Tokenize(pb.TokenizeRequest(chat=chat))
            assert reply.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            chat.add_generation_prompt = False
            reply = await harness.inference.Tokenize(pb.TokenizeRequest(chat=chat))
            assert reply.text == "<|im_start|>user\nhi<|im_end|>\n"
            ids = [*reply.ids]
            shown = await harness.inference.Detokenize(pb.DetokenizeRequest(ids=ids))
            hidden = await harness.inference.Detokenize(
                pb.DetokenizeRequest(ids=ids, skip_special_tokens=True)
            )
            assert (shown.text, hidden.text) == ("<|im_start|>user\nhi<|im_end|>\n", "user\nhi\n")

    run(scenario())


def test_a_request_id_is_drawn_if_none_is_given(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with rpc_server(tiny_checkpoint) as harness:
            harness.pool.on_submit = answers_with([60])
            replies = [await harness.inference.Complete(pb.GenerateRequest(text="a")) for _ in range(2)]
            assert len({reply.request_id for reply in replies} - {""}) == 2

    run(scenario())
