"""Device-side sampling and log-probabilities against the reference engine's, over several steps of a slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from kernel_support import BF16, Gpu, assert_close

from engine.interface import Sampling
from engine.reference.ops.logprobs import token_logprobs as reference_logprobs
from engine.reference.ops.philox import uniform
from engine.reference.sampler import Sampler
from kernels import logprobs, sampling, slots
from kernels.sampling import RowStatus
from kernels.tensor import DType, Tensor

pytestmark = pytest.mark.gpu
BOUNDARY = 1e-6
"""A draw this close to the boundary of two tokens may fall to either: exp differs in its last bit."""


class Table:
    """Slots with their state on the device, sampled step by step."""

    def __init__(self, gpu: Gpu, n_slots: int, vocab: int, rows: int, logit_type: DType = DType.F32) -> None:
        self.gpu, self.vocab = gpu, vocab
        self.shape = slots.SlotShape(n_slots, vocab, max_stop=8, max_bias=300)
        buffers = {name: gpu.empty(s, t, fill=0) for name, (s, t) in self.shape.buffers().items()}
        self.slots = slots.SlotBuffers(self.shape, **buffers)
        self.stride = -(-vocab // 64) * 64
        sample_shape = sampling.SampleShape(rows, self.stride, vocab)
        self.scratch = gpu.buffers(sampling.SampleScratch, sample_shape.scratch())
        self.logits = gpu.empty((rows, self.stride), logit_type)
        self.row_slot = gpu.empty((rows,), DType.I32)
        self.tokens, self.statuses = gpu.empty((rows,), DType.I32), gpu.empty((rows,), DType.I32)
        self.block_table = gpu.empty((n_slots, 4), DType.I32)

    def start(self, setups: list[slots.SlotSetup]) -> None:
        gpu, staged = self.gpu, slots.stage_starts(setups, self.shape)
        raw = staged.starts.view(np.uint8).reshape(len(setups), -1)
        launch = slots.start_slots(
            gpu.library,
            starts=gpu.upload(raw),
            count=len(setups),
            tokens=_some(gpu, staged.tokens),
            bias_ids=_some(gpu, staged.bias_ids),
            bias_values=_some(gpu, staged.bias_values),
            slots=self.slots,
        )
        gpu.run(launch)

    def change(
        self, changes: list[tuple[int, int, int]], pages: list[tuple[int, int, int]] | None = None
    ) -> None:
        gpu, pages = self.gpu, pages or []
        lists = [np.array([(*c, 0) for c in items] or [(0, 0, 0, 0)], np.int32) for items in (changes, pages)]
        launch = slots.change_slots(
            gpu.library,
            counts=gpu.upload(np.array([len(changes), len(pages)], np.int32)),
            changes=gpu.upload(lists[0]),
            pages=gpu.upload(lists[1]),
            slots=self.slots,
            block_table=self.block_table,
        )
        gpu.run(launch)

    def sample(
        self, logits: np.ndarray, row_slot: list[int], *, first_token: bool, all_greedy: bool = False
    ) -> tuple[list[int], list[int]]:
        padded = np.full(
            self.logits.shape, np.nan, logits.dtype
        )  # what is past the vocabulary must not matter
        padded[:, : self.vocab] = logits
        self.gpu.write(self.logits, padded)
        self.gpu.write(self.row_slot, np.array(row_slot, np.int32))
        launches = sampling.sample(
            self.gpu.library,
            logits=self.logits,
            row_slot=self.row_slot,
            slots=self.slots,
            scratch=self.scratch,
            tokens=self.tokens,
            statuses=self.statuses,
            first_token=first_token,
            all_greedy=all_greedy,
        )
        self.gpu.run(*launches)
        return self.gpu.download(self.tokens).tolist(), self.gpu.download(self.statuses).tolist()


def _some(gpu: Gpu, array: np.ndarray) -> Tensor:
    return gpu.upload(array if len(array) else np.zeros(1, array.dtype))


def setup_of(slot: int, how: Sampling, prompt: np.ndarray, output: np.ndarray) -> slots.SlotSetup:
    fields = {f.name for f in dataclasses.fields(slots.SlotSetup)}
    same = {name: getattr(how, name) for name in fields & {f.name for f in dataclasses.fields(Sampling)}}
    return slots.SlotSetup(
        **{
            **same,
            "slot": slot,
            "stop_ids": tuple(how.stop_token_ids),
            "bias": dict(how.logit_bias),
            "prompt": prompt,
            "output": output,
        }
    )


def is_at_boundary(sampler: Sampler, logits: np.ndarray, got: int, want: int, index: int) -> bool:
    """Whether the draw, or the cut of top-p, lies within rounding of the step between the two tokens."""
    how = sampler.sampling
    processed = sampler._process(logits).astype(np.float64)
    weights = np.exp((processed - processed.max()) / how.temperature)
    order = np.argsort(-processed, kind="stable")
    kept = order[: how.top_k] if 0 < how.top_k < len(order) else order
    running = np.cumsum(weights[kept])
    if how.top_p < 1:
        margin = np.abs(running / running[-1] - how.top_p).min()
        if margin < BOUNDARY:
            return True
        kept = kept[: int(np.searchsorted(running, how.top_p * running[-1])) + 1]
    if how.min_p > 0:
        if np.abs(weights[kept] - how.min_p).min() < BOUNDARY * how.min_p:
            return True
        kept = kept[weights[kept] >= how.min_p]
    ids = np.sort(kept)
    share = np.cumsum(weights[ids]) / weights[ids].sum()
    low, high = sorted((got, want))
    if low not in ids or high not in ids:
        return False
    u = uniform(how.seed, index)
    first, last = np.searchsorted(ids, low), np.searchsorted(ids, high)
    return bool(np.all(np.abs(share[first:last] - u) < BOUNDARY))


def settings(rng: np.random.Generator, vocab: int) -> Iterator[Sampling]:
    """Every feature alone and in company."""
    stops = frozenset(int(t) for t in rng.integers(0, vocab, 3))
    bias = {int(t): float(b) for t, b in zip(rng.integers(0, vocab, 250), rng.normal(0, 8, 250), strict=True)}
    yield Sampling(temperature=0.0)
    yield Sampling(temperature=0.0, repetition_penalty=1.3, logit_bias=bias)
    yield Sampling(temperature=0.0, logit_bias={7: 1e4}, stop_token_ids=frozenset({7}), min_tokens=2)
    yield Sampling(temperature=1.0)
    yield Sampling(temperature=0.3)
    yield Sampling(temperature=2.5)
    yield Sampling(temperature=1e-3)
    for top_k in (1, 2, 50, 3000, vocab, vocab + 9):
        yield Sampling(top_k=top_k)
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.95, 0.999):
        yield Sampling(top_p=top_p)
        yield Sampling(top_p=top_p, top_k=40, temperature=0.7)
        yield Sampling(top_p=top_p, min_p=0.05, temperature=1.5)
    yield Sampling(min_p=0.02)
    yield Sampling(min_p=1.0)
    yield Sampling(min_p=0.1, top_k=20)
    yield Sampling(presence_penalty=1.5, frequency_penalty=0.5, top_p=0.9)
    yield Sampling(repetition_penalty=0.7, temperature=0.8)
    yield Sampling(logit_bias=bias, stop_token_ids=stops, min_tokens=3, top_k=100)
    yield Sampling(
        stop_token_ids=stops, repetition_penalty=1.1, presence_penalty=-1.0, top_p=0.8, top_k=500, min_p=0.01
    )


@pytest.mark.parametrize("vocab", [70, 4096, 5001, 49152, 151936])
@pytest.mark.parametrize("kind", ["wide", "ties", "bf16"])
def test_sampling_is_the_references(gpu: Gpu, rng: np.random.Generator, vocab: int, kind: str) -> None:
    choices = [
        dataclasses.replace(s, seed=int(rng.integers(0, 2**64, dtype=np.uint64)))
        for s in settings(rng, vocab)
    ]
    rows = len(choices)
    table = Table(gpu, rows + 2, vocab, rows, DType.BF16 if kind == "bf16" else DType.F32)
    row_slot = [int(s) for s in rng.permutation(rows + 2)[:rows]]
    prompts = [rng.integers(0, vocab, 30).astype(np.int32) for _ in choices]
    outputs = [rng.integers(0, vocab, int(n)).astype(np.int32) for n in rng.integers(0, 5, rows)]
    parts = list(zip(row_slot, choices, prompts, outputs, strict=True))
    table.start([setup_of(*part) for part in parts])
    table.change([(slot, 10 * slot, 0) for slot in row_slot])
    samplers = [Sampler(how, prompt, output, vocab) for _, how, prompt, output in parts]
    counts = [len(output) for output in outputs]
    live = [True] * rows
    differences = 0
    for step in range(4):
        logits = rng.standard_normal((rows, vocab), np.float32) * 3
        if kind == "ties":
            logits = np.round(logits * 2) / 2
        if kind == "bf16":
            logits = logits.astype(BF16)
        logits[:, 3] = -np.inf
        tokens, statuses = table.sample(logits, row_slot, first_token=step == 0)
        for row, sampler in enumerate(samplers):
            if not live[row]:
                assert (tokens[row], statuses[row]) == (-1, RowStatus.NO_TOKEN)
                continue
            raw = logits[row].astype(np.float32)
            before = Sampler.__new__(Sampler)
            before.__dict__.update(sampler.__dict__)
            index = counts[row]
            want, stopped = sampler.next(raw)
            got = tokens[row]
            if got != want:
                before._n_output = index
                assert is_at_boundary(before, raw, got, want, index), (sampler.sampling, step, got, want)
                differences += 1
                live[row] = False  # the two histories part here
                table.change([(row_slot[row], -1, 0)])
                continue
            assert statuses[row] == (RowStatus.STOPPED if stopped else RowStatus.TOKEN), (row, step)
            counts[row] += 1
            live[row] = not stopped
    assert differences <= 2
    state = {
        name: gpu.download(getattr(table.slots, name)) for name in ("position", "active", "output_count")
    }
    for row, slot in enumerate(row_slot):
        if differences == 0:
            assert state["output_count"][slot] == counts[row]
            assert state["position"][slot] == 10 * slot + counts[row] - len(outputs[row])
            assert state["active"][slot] == live[row]


def test_uniform_draws_reach_every_token(gpu: Gpu, rng: np.random.Generator) -> None:
    """3,000 draws from 40 tokens: no token is off its share by five standard deviations."""
    vocab, rows, rounds = 40, 100, 30
    table = Table(gpu, rows, vocab, rows)
    table.start([slots.SlotSetup(slot=s, seed=1000 + s) for s in range(rows)])
    logits = np.tile(rng.standard_normal(vocab).astype(np.float32), (rows, 1))
    seen = np.zeros(vocab)
    for step in range(rounds):
        tokens, _ = table.sample(logits, list(range(rows)), first_token=step == 0)
        seen += np.bincount(tokens, minlength=vocab)
    share = np.exp(logits[0]) / np.exp(logits[0]).sum()
    draws = rows * rounds
    assert (np.abs(seen - draws * share) < 5 * np.sqrt(draws * share * (1 - share)) + 1).all()


def test_greedy_needs_two_launches_only(gpu: Gpu, rng: np.random.Generator) -> None:
    vocab = 33000
    table = Table(gpu, 4, vocab, 5)
    table.start([slots.SlotSetup(slot=s, temperature=0.0) for s in range(4)])
    logits = np.round(rng.standard_normal((5, vocab), np.float32) * 4)  # many equal peaks
    tokens, statuses = table.sample(logits, [2, -1, 0, 1, 3], first_token=True, all_greedy=True)
    assert tokens == [int(np.argmax(row)) if i != 1 else -1 for i, row in enumerate(logits)]
    assert statuses == [1, 0, 1, 1, 1]
    assert gpu.download(table.slots.last_token).tolist() == [tokens[i] for i in (2, 3, 0, 4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_that_rows_fault_alone(gpu: Gpu, rng: np.random.Generator, temperature: float) -> None:
    vocab = 9000
    table = Table(gpu, 5, vocab, 5)
    table.start([slots.SlotSetup(slot=s, temperature=temperature, top_p=0.9) for s in range(5)])
    logits = rng.standard_normal((5, vocab), np.float32)
    logits[0, 8999], logits[2, 5], logits[3] = np.nan, np.inf, -np.inf
    tokens, statuses = table.sample(logits, [0, 1, 2, 3, 4], first_token=True)
    assert [s == RowStatus.FAULT for s in statuses] == [True, False, True, True, False]
    assert [t == -1 for t in tokens] == [True, False, True, True, False]
    assert gpu.download(table.slots.active).tolist() == [0, 1, 0, 0, 1]


def test_slot_control(gpu: Gpu) -> None:
    table = Table(gpu, 6, 100, 2)
    table.change([(0, 17, 1), (5, -1, 1), (3, 4, -1)], [(2, 1, 77), (5, 3, 5)])
    assert gpu.download(table.slots.position).tolist() == [17, 0, 0, 4, 0, 0]
    assert gpu.download(table.slots.active).tolist() == [1, 0, 0, 0, 0, 1]
    want = np.full((6, 4), -1)
    want[2, 1], want[5, 3] = 77, 5
    assert (gpu.download(table.block_table) == want).all()
    prompt, output = np.array([5, 5, 9], np.int32), np.array([9, 7, 9], np.int32)
    table.start([slots.SlotSetup(slot=3, frequency_penalty=0.1, prompt=prompt, output=output)])
    counts = gpu.download(table.slots.counts)[3]
    expected = np.zeros(100, np.uint32)
    expected[[5, 9]] += np.uint32(0x80000000)
    expected[[9, 7]] += np.array([2, 1], np.uint32)
    assert (counts == expected).all()
    assert gpu.download(table.slots.output_count)[3] == 3
    assert gpu.download(table.slots.position)[3] == 0


@pytest.mark.parametrize("vocab", [50, 4096, 151936])
@pytest.mark.parametrize("logit_type", [DType.F32, DType.BF16])
def test_logprobs_are_the_references(
    gpu: Gpu, rng: np.random.Generator, vocab: int, logit_type: DType
) -> None:
    rows = 9
    table = Table(gpu, 2, vocab, 1)
    stride = table.stride
    logits = np.full((rows, stride), np.nan, np.float32)
    logits[:, :vocab] = rng.standard_normal((rows, vocab), np.float32) * 4
    logits[1, :vocab] = np.round(logits[1, :vocab])
    logits[2, :10] = -np.inf
    logits = logits.astype(BF16) if logit_type is DType.BF16 else logits
    targets = rng.integers(0, vocab, rows).astype(np.int32)
    targets[4] = -1
    alternatives = np.array([20, 20, 20, 5, 3, 0, -1, 1, 20], np.int32)
    outputs = logprobs.LogprobOutputs(
        gpu.empty((rows,), DType.F32),
        gpu.empty((rows,), DType.I32),
        gpu.empty((rows, 20), DType.I32),
        gpu.empty((rows, 20), DType.F32),
    )
    gpu.run(
        *logprobs.token_logprobs(
            gpu.library,
            logits=gpu.upload(logits),
            targets=gpu.upload(targets),
            slots=table.slots,
            parts=gpu.empty(logprobs.parts_shape(rows, vocab), DType.U8),
            outputs=outputs,
            alternatives=gpu.upload(alternatives),
        )
    )
    values, ranks = gpu.download(outputs.logprobs), gpu.download(outputs.ranks)
    top_ids, top_values = gpu.download(outputs.top_ids), gpu.download(outputs.top_logprobs)
    for row in range(rows):
        if targets[row] < 0 or alternatives[row] < 0:
            assert ranks[row] == 0
            continue
        want = reference_logprobs(
            logits[row, :vocab].astype(np.float32), int(targets[row]), int(alternatives[row])
        )
        assert ranks[row] == want.rank, row
        assert_close("logprob", values[row : row + 1], np.array([want.logprob]), rtol=1e-5, atol=1e-5)
        count = len(want.top_ids)
        assert top_ids[row, :count].tolist() == list(want.top_ids), row
        assert (top_ids[row, count:] == -1).all()
        assert_close("top", top_values[row, :count], np.array(want.top_logprobs), rtol=1e-5, atol=1e-5)
