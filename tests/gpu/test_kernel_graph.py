"""A whole decode step in a CUDA graph, replayed with dependent launch, against plain launches one by one.

The step is a model's without its matrix products: rows of a table stand for q|k|v, and the normed attention
result for logits. What it proves is the order of things: kernels that start early read nothing too early, and
a graph captured at one context serves all later ones.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cuda.bindings import driver
from kernel_support import Gpu, check, random_bf16

from kernels import attention_decode, embedding, norm, rope, sampling, slots
from kernels.compiler import compile_units, default_cache_folder
from kernels.launch import KernelLibrary, Launch
from kernels.registry import all_units
from kernels.tensor import DType

pytestmark = pytest.mark.gpu
N_HEADS, N_KV_HEADS, HEAD_DIM = 16, 4, 128
VOCAB = N_HEADS * HEAD_DIM
WIDTH = 12


class Decoder:
    """Slots that feed on their own tokens."""

    def __init__(self, gpu: Gpu, library: KernelLibrary, rows: int, starts: np.ndarray, seed: int) -> None:
        self.gpu, self.library, rng = gpu, library, np.random.default_rng(seed)
        shape = slots.SlotShape(rows, VOCAB, max_stop=4, max_bias=4)
        self.slots = slots.SlotBuffers(
            shape, **{name: gpu.empty(s, t, fill=0) for name, (s, t) in shape.buffers().items()}
        )
        settings = ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 40, "temperature": 1.5}, {"min_p": 0.05})
        setups = [
            slots.SlotSetup(slot=s, seed=s, frequency_penalty=0.3 * (s % 2), **settings[s % 4])
            for s in range(rows)
        ]
        staged = slots.stage_starts(setups, shape)
        nothing = gpu.upload(np.zeros(1, np.int32))
        gpu.run(
            slots.start_slots(
                library,
                starts=gpu.upload(staged.starts.view(np.uint8).reshape(rows, -1)),
                count=rows,
                tokens=nothing,
                bias_ids=nothing,
                bias_values=gpu.upload(np.zeros(1, np.float32)),
                slots=self.slots,
            )
        )
        gpu.write(self.slots.position, starts.astype(np.int32))
        gpu.write(self.slots.active, np.ones(rows, np.int32))
        gpu.write(self.slots.last_token, rng.integers(0, VOCAB, rows).astype(np.int32))
        pages = rows * WIDTH
        self.k_pages = gpu.upload(random_bf16(rng, pages, N_KV_HEADS, 64, HEAD_DIM))
        self.v_pages = gpu.upload(random_bf16(rng, pages, N_KV_HEADS, 64, HEAD_DIM))
        self.tokens, self.statuses = gpu.empty((rows,), DType.I32), gpu.empty((rows,), DType.I32)
        table = rng.permutation(pages).astype(np.int32).reshape(rows, WIDTH)
        self.step = self._step(
            rows, gpu.upload(rng.permutation(rows).astype(np.int32)), gpu.upload(table), rng
        )

    def _step(self, rows: int, row_slot: object, table: object, rng: np.random.Generator) -> list[Launch]:
        gpu, library = self.gpu, self.library
        qkv_width = (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM
        qkv, query = (
            gpu.empty((rows, qkv_width), DType.BF16),
            gpu.empty((rows, N_HEADS, HEAD_DIM), DType.BF16),
        )
        attended, logits = gpu.empty(query.shape, DType.BF16), gpu.empty((rows, VOCAB), DType.BF16)
        angles = rng.uniform(-3, 3, (WIDTH * 64, HEAD_DIM // 2)).astype(np.float32)
        splits = attention_decode.max_splits(gpu.limits, N_KV_HEADS)
        shape = attention_decode.DecodeShape(rows, N_HEADS, N_KV_HEADS, HEAD_DIM, splits)
        plan = gpu.buffers(attention_decode.DecodePlan, shape.plan())
        position, active = self.slots.position, self.slots.active
        return [
            attention_decode.plan_decode(
                library,
                row_slot=row_slot,
                slot_position=position,
                slot_active=active,
                plan=plan,
                splits=splits,
                min_pages=attention_decode.min_split_pages(N_HEADS // N_KV_HEADS),
            ),
            embedding.embed(
                library,
                table=gpu.upload(random_bf16(rng, VOCAB, qkv_width)),
                row_slot=row_slot,
                slot_token=self.slots.last_token,
                out=qkv,
            ),
            rope.rope_and_write(
                library,
                heads=rope.HeadInput(qkv, gpu.upload(np.cos(angles)), gpu.upload(np.sin(angles))),
                row_slot=row_slot,
                block_table=table,
                q_out=query,
                k_pages=self.k_pages,
                v_pages=self.v_pages,
                slot_position=position,
                slot_active=active,
            ),
            *attention_decode.attention_decode(
                library,
                gpu.limits,
                query=query,
                k_pages=self.k_pages,
                v_pages=self.v_pages,
                block_table=table,
                plan=plan,
                workspace=gpu.buffers(attention_decode.DecodeWorkspace, shape.workspace()),
                out=attended,
                splits=splits,
                scale=HEAD_DIM**-0.5,
            ),
            norm.add_rms_norm(
                library,
                residual=attended.view(rows, VOCAB),
                weight=gpu.upload(random_bf16(rng, VOCAB, scale=2.0)),
                out=logits,
                epsilon=1e-6,
            ),
            *sampling.sample(
                library,
                logits=logits,
                row_slot=row_slot,
                slots=self.slots,
                scratch=gpu.buffers(
                    sampling.SampleScratch, sampling.SampleShape(rows, VOCAB, VOCAB).scratch()
                ),
                tokens=self.tokens,
                statuses=self.statuses,
                first_token=False,
            ),
        ]

    def capture(self) -> int:
        """The step as an executable graph."""
        stream = self.gpu.stream
        check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        for launch in self.step:
            launch(stream)
        graph = check(driver.cuStreamEndCapture(stream))
        return int(check(driver.cuGraphInstantiate(graph, 0)))


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_replayed_step_gives_the_tokens_of_plain_launches(gpu: Gpu, rows: int) -> None:
    starts = np.random.default_rng(rows).integers(0, 700, rows)
    starts[0] = 60  # crosses into a new page
    units = compile_units(all_units(), gpu.limits.arch, cache_folder=default_cache_folder())
    plain = Decoder(gpu, KernelLibrary(units, dependent_launch=False), rows, starts, seed=rows)
    replayed = Decoder(gpu, gpu.library, rows, starts, seed=rows)
    graph = driver.CUgraphExec(replayed.capture())
    rounds = 40
    want, got = [], []
    for _ in range(rounds):
        for launch in plain.step:
            gpu.run(launch)
        want.append(gpu.download(plain.tokens))
    for _ in range(rounds):
        check(driver.cuGraphLaunch(graph, gpu.stream))
        got.append(gpu.download(replayed.tokens))
    check(driver.cuGraphExecDestroy(graph))
    assert np.array(got).tolist() == np.array(want).tolist()
    assert (np.array(got) >= 0).all()
    for name in dataclasses.asdict(plain.slots):
        if name != "shape":
            pair = [gpu.download(getattr(decoder.slots, name)) for decoder in (plain, replayed)]
            assert (pair[0] == pair[1]).all(), name
    keys = [gpu.download(decoder.k_pages).view(np.uint16) for decoder in (plain, replayed)]
    assert (keys[0] == keys[1]).all()
