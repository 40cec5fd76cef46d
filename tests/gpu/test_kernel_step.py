"""Decode attention in one launch against float64: bf16 and e4m3 pages, clusters, windows, partial turns."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from cuda.bindings import driver
from kernel_support import BF16, Gpu, assert_close, assert_untouched, check
from step_support import PAGE, Cache, RawRows, check_attention

from kernels.attention_step import VARIANTS, StepVariant, attention_step, pick_cluster
from kernels.launch import Launch
from kernels.rope import rope_and_write
from kernels.tensor import DType, Tensor

pytestmark = pytest.mark.gpu
CONTEXTS = [1, 2, 63, 64, 65, 127, 200, 4097, 129]
INACTIVE = 6


class Step:
    """A layer's decode rows: a slot each in shuffled order, one padding row, one inactive slot."""

    def __init__(
        self,
        rng: np.random.Generator,
        contexts: list[int],
        group: int,
        head_dim: int,
        *,
        n_kv: int = 2,
        rotated: int | None = None,
        quantised: bool = False,
        inactive: int | None = None,
        padding: bool = True,
        **optional: bool,
    ) -> None:
        self.contexts = contexts
        self.row_slot = rng.permutation(len(contexts)).astype(np.int32)
        if padding:
            self.row_slot = np.insert(self.row_slot, 1, -1).astype(np.int32)
        self.active = np.ones(len(contexts), np.int32)
        if inactive is not None:
            self.active[inactive] = 0
        rows = len(self.row_slot)
        self.raw = RawRows(
            rng, rows, (group * n_kv, n_kv), head_dim, rotated or head_dim, max(contexts), **optional
        )
        before = [context - 1 for context in contexts]
        self.cache = Cache(rng, before, contexts, n_kv, head_dim, quantised=quantised)
        self.scale = head_dim**-0.5

    def live(self) -> list[tuple[int, int]]:
        """Rows and their slots."""
        return [(r, s) for r, s in enumerate(self.row_slot.tolist()) if s >= 0 and self.active[s]]

    def launch(
        self,
        gpu: Gpu,
        *,
        window: int | None = None,
        variant: StepVariant | None = None,
        cluster: int | None = None,
    ) -> tuple[Launch, dict[str, Tensor], Tensor]:
        tensors = self.cache.upload(gpu)
        out = gpu.empty((len(self.row_slot), self.raw.n_heads, self.raw.head_dim), DType.BF16)
        launch = attention_step(
            gpu.library,
            gpu.limits,
            heads=self.raw.upload(gpu),
            row_slot=gpu.upload(self.row_slot),
            slot_position=gpu.upload(np.array(self.contexts, np.int32) - 1),
            slot_active=gpu.upload(self.active),
            block_table=gpu.upload(self.cache.block_table),
            out=out,
            scale=self.scale,
            window=window,
            variant=variant,
            cluster=cluster,
            **tensors,
        )
        return launch, tensors, out

    def check(self, gpu: Gpu, tensors: dict[str, Tensor], out: Tensor, window: int | None = None) -> None:
        """The cache by its protocol; each row against float64 on the cache as it now is."""
        got, after, want = gpu.download(out), copy.copy(self.cache), copy.deepcopy(self.cache)
        after.download(gpu, tensors)
        rows, slots = np.array(self.live()).T
        positions = np.array(self.contexts)[slots] - 1
        q, k, v = self.raw.expected(rows, positions)
        for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            want.write(slot, position, np.stack([k[i], v[i]])[:, None])
        after.check(want)
        q = q.astype(np.float16 if self.cache.quantised else BF16).astype(np.float64)
        for i, row in enumerate(rows.tolist()):
            context = int(positions[i]) + 1
            cached = after.gather(int(slots[i]), context)
            check_attention(f"row {row}, context {context}", got[row], q[i], cached, self.scale, window)
        others = np.setdiff1d(np.arange(len(self.row_slot)), rows)
        assert (got[others].astype(np.float32) == 0).all(), "a row without an active slot is not zeros"


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("window", "group", "head_dim"),
    [
        *((None, group, head_dim) for group in (1, 2, 3, 7, 8, 16) for head_dim in (64, 128)),
        *((window, 7, 128) for window in (1, 100, 1024)),
        (None, 2, 256),
        (100, 16, 256),
        (100, 3, 64),
    ],
)
def test_step(
    gpu: Gpu, rng: np.random.Generator, window: int | None, group: int, head_dim: int, quantised: bool
) -> None:
    kinds = {"norm": group % 2 == 0, "bias": group % 3 == 0, "scaled": group == 7}
    step = Step(rng, CONTEXTS, group, head_dim, quantised=quantised, inactive=INACTIVE, **kinds)
    launch, tensors, out = step.launch(gpu, window=window)
    gpu.run(launch)
    step.check(gpu, tensors, out, window)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize(("head_dim", "rotated"), [(256, 64), (128, 64), (64, 64), (128, 128)])
def test_clusters(
    gpu: Gpu, rng: np.random.Generator, head_dim: int, rotated: int, cluster: int, quantised: bool
) -> None:
    contexts = [1, 64, 2500, 640, 130]
    step = Step(rng, contexts, 2, head_dim, rotated=rotated, quantised=quantised, norm=True, scaled=True)
    launch, tensors, out = step.launch(gpu, cluster=cluster)
    gpu.run(launch)
    step.check(gpu, tensors, out)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.expression)
def test_step_variants(gpu: Gpu, rng: np.random.Generator, variant: StepVariant) -> None:
    """Also those that this device would not pick."""
    quantised = variant.kv is DType.E4M3
    step = Step(rng, [1, 64, 700, 3000], 4, variant.head_dim, quantised=quantised, bias=True)
    launch, tensors, out = step.launch(gpu, variant=variant)
    gpu.run(launch)
    step.check(gpu, tensors, out)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 33, 200])
def test_many_rows(gpu: Gpu, rng: np.random.Generator, rows: int, quantised: bool) -> None:
    contexts = [int(c) for c in rng.integers(1, 300, rows)]
    step = Step(rng, contexts, 2, 128, n_kv=8, quantised=quantised, norm=True, padding=rows > 1)
    launch, tensors, out = step.launch(gpu)
    gpu.run(launch)
    step.check(gpu, tensors, out)


@pytest.mark.parametrize("quantised", [False, True])
def test_step_does_not_depend_on_the_batch(gpu: Gpu, rng: np.random.Generator, quantised: bool) -> None:
    """Of one cluster size: a row's bits, alone and among others, run after run."""
    contexts = [int(c) for c in rng.integers(1, 3000, 16)]
    step = Step(rng, contexts, 2, 128, quantised=quantised, norm=True, padding=False)
    cluster = pick_cluster(gpu.limits, 16, 2)
    launch, tensors, out = step.launch(gpu, cluster=cluster)
    gpu.run(launch)
    step.check(gpu, tensors, out)
    together = gpu.download(out)
    gpu.run(launch, launch)
    assert (gpu.download(out).view(np.uint16) == together.view(np.uint16)).all(), "a repeated launch differs"
    for row in (0, 7, 15):
        alone = copy.copy(step)
        alone.row_slot, alone.raw = step.row_slot[row : row + 1], copy.copy(step.raw)
        alone.raw.qkv = step.raw.qkv[row : row + 1]
        single, _, one_out = alone.launch(gpu, cluster=cluster)
        gpu.run(single)
        assert (gpu.download(one_out)[0].view(np.uint16) == together[row].view(np.uint16)).all()


@pytest.mark.parametrize("quantised", [False, True])
def test_step_in_a_graph(gpu: Gpu, rng: np.random.Generator, quantised: bool) -> None:
    """Eight layers one after another, each from its own rows, replayed twice with dependent launch."""
    steps = [Step(rng, [384, 77, 640], 2, 128, n_kv=8, quantised=quantised, norm=True) for _ in range(8)]
    launches = [step.launch(gpu) for step in steps]
    check(driver.cuStreamBeginCapture(gpu.stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    for launch, _, _ in launches:
        launch(gpu.stream)
    graph = check(driver.cuStreamEndCapture(gpu.stream))
    executable = check(driver.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        check(driver.cuGraphLaunch(executable, gpu.stream))
    for step, (_, tensors, out) in zip(steps, launches, strict=True):
        step.check(gpu, tensors, out)
    check(driver.cuGraphExecDestroy(executable))
    check(driver.cuGraphDestroy(graph))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("n_kv", [1, 3])
def test_prefill_quantises_pages(gpu: Gpu, rng: np.random.Generator, head_dim: int, n_kv: int) -> None:
    """Ragged segments: from a page's start, from within a page, of one row, over many pages."""
    segments = [(0, 1), (0, 63), (64, 65), (37, 200), (500, 1), (0, 130), (63, 66), (7, 9)]
    lengths = [length for _, length in segments]
    room = [start + length for start, length in segments]
    cache = Cache(rng, [start for start, _ in segments], room, n_kv, head_dim, quantised=True)
    slots = rng.permutation(len(segments))
    cache.block_table = cache.block_table[np.argsort(slots)]
    row_slot = np.concatenate([np.repeat(slots, lengths), [-1] * 5]).astype(np.int32)
    positions = np.concatenate([*(start + np.arange(n) for start, n in segments), [0] * 5]).astype(np.int32)
    rows = len(row_slot)
    raw = RawRows(rng, rows, (2 * n_kv, n_kv), head_dim, head_dim // 2, max(room), norm=True, scaled=True)
    tensors = cache.upload(gpu)
    q_out = gpu.empty((rows, 2 * n_kv, head_dim), DType.BF16)
    launch = rope_and_write(
        gpu.library,
        heads=raw.upload(gpu),
        row_slot=gpu.upload(row_slot),
        row_position=gpu.upload(positions),
        q_out=q_out,
        block_table=gpu.upload(cache.block_table),
        **tensors,
    )
    gpu.run(launch)
    q, k, v = raw.expected(np.arange(rows - 5), positions[:-5])
    got = gpu.download(q_out)
    assert_close("q", got[:-5], q, rtol=2**-7, atol=2**-10)
    assert_untouched("padding", got[-5:])
    want, after = copy.deepcopy(cache), copy.copy(cache)
    after.download(gpu, tensors)
    first = 0
    for slot, (start, length) in zip(slots.tolist(), segments, strict=True):
        at = start
        while at < start + length:
            stop = min(start + length, (at // PAGE + 1) * PAGE)
            piece = slice(first + at - start, first + stop - start)
            want.write(slot, at, np.stack([k[piece], v[piece]]))
            at = stop
        first += length
    after.check(want)
