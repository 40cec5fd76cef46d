"""Buckets, staged plans and buffer plans of the CUDA engine: no GPU, no launch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from engine.checkpoint import open_checkpoint
from engine.cuda.buckets import MOST_WIDTH, decode_widths, pick, prefill_sizes
from engine.cuda.buffers import BufferPlan, BufferSizes, rope_values
from engine.cuda.features import require_supported
from engine.cuda.ledger import Ledger
from engine.cuda.memory import Layout
from engine.cuda.staging import Stager
from engine.errors import UnsupportedModelError
from engine.interface import EngineCapacity, PageAssignment, PrefillChunk, Sampling, SlotStart, StepPlan
from engine.plan_check import PlanLimits
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from tests.cuda_scenarios import VOCAB, checkpoint
from tests.parity.families import CASES, Case, build_checkpoint
from tests.unit.cuda_twin import HOPPER

NONE = np.zeros(0, np.int32)


@given(st.integers(1, MOST_WIDTH), st.data())
def test_a_decode_bucket_wastes_little(slots: int, data: st.DataObject) -> None:
    widths = decode_widths(slots)
    count = data.draw(st.integers(1, slots))
    width = pick(widths, count)
    assert count <= width <= max(2 * count, count + count // 7 + 8)
    assert list(widths) == sorted(set(widths))


@given(st.integers(1, 20_000), st.data())
def test_a_prefill_bucket_wastes_little(tokens: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, tokens))
    size = pick(prefill_sizes(tokens), count)
    assert count <= size <= max(16, 2 * count)
    assert size % 16 == 0


def test_a_step_that_no_bucket_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="9 rows exceed the largest bucket, 8"):
        pick((4, 8), 9)
    with pytest.raises(ValueError, match="1025 sequences"):
        decode_widths(MOST_WIDTH + 1)


class Bench:
    """A ledger and a stager of a tiny model, and arrays to stage into."""

    def __init__(self, folder: Path) -> None:
        with open_checkpoint(checkpoint(folder)) as opened:
            config = opened.config
        sizes = BufferSizes(rows=128, slots=6, width=8, positions=256)
        self.plan = BufferPlan(config, HOPPER, sizes)
        self.stager = Stager(self.plan, decode_widths(6), prefill_sizes(128))
        capacity = EngineCapacity(6, 24, 256, 128, 2, True)
        self.ledger = Ledger(PlanLimits(capacity, VOCAB))
        self.host = {
            name: np.full(place.shape, 77, np.int32)
            for name, place in self.stager.region.layout.reservations.items()
        }

    def stage(self, plan: StepPlan) -> object:
        self.ledger.check(plan)
        self.ledger.apply(plan)
        return self.stager.stage(plan, self.host, self.ledger)


def start(slot: int, **sampling: object) -> SlotStart:
    return SlotStart(slot, Sampling(**sampling), NONE, NONE)  # type: ignore[arg-type]


def pages(slot: int, first: int, count: int) -> tuple[PageAssignment, ...]:
    return tuple(PageAssignment(slot, index, first + index) for index in range(count))


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_ragged_pass_is_laid_out_row_by_row(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    work = bench.stage(
        StepPlan(
            0,
            starts=(start(4), start(1, temperature=0.0)),
            pages=(*pages(4, 0, 2), *pages(1, 7, 1)),
            prefills=(
                PrefillChunk(4, np.arange(10, 30, dtype=np.int32), 64, False),
                PrefillChunk(1, tokens(5, 6, 7), 0, True),
            ),
        )
    )
    host = bench.host
    assert work.prefill.size == 32
    assert host["tokens"][:32].tolist() == [*range(10, 30), 5, 6, 7, *[-1] * 9]
    assert host["row_slot"][:32].tolist() == [4] * 20 + [1] * 3 + [-1] * 9
    assert host["row_position"][:23].tolist() == [*range(64, 84), 0, 1, 2]
    assert work.prefill.first_tokens.slots == [1]
    assert (host["first_slots"][0], host["last_rows"][0]) == (1, 22)
    assert host["counts"].tolist() == [1, 3]
    assert host["changes"][0].tolist() == [1, 2, -1, 0]
    assert host["pages"][:3].tolist() == [[4, 0, 0, 0], [4, 1, 1, 0], [1, 0, 7, 0]]
    tiles = host["tiles.0"][: host["n_tiles.0"][0]]
    assert {tuple(tile[:4]) for tile in tiles.tolist()} == {(4, 0, 20, 64), (1, 20, 3, 0)}


def test_an_unchanged_decode_list_is_not_copied_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    chunks = tuple(PrefillChunk(slot, tokens(5), 0, True) for slot in (0, 2, 5))
    starts = tuple(start(slot, temperature=0.0) for slot in (0, 2, 5))
    given_pages = tuple(page for slot in (0, 2, 5) for page in pages(slot, slot, 1))
    bench.stage(StepPlan(0, starts=starts, pages=given_pages, prefills=chunks))
    first = bench.stage(StepPlan(1, decodes=(0, 2, 5)))
    assert first.copy_bytes > 0
    assert first.decode.key.width == 4
    assert bench.host["decode_slots"][:4].tolist() == [0, 2, 5, -1]
    assert bench.stage(StepPlan(2, decodes=(0, 2, 5))).copy_bytes == 0
    assert bench.stage(StepPlan(3, decodes=(0, 2))).copy_bytes > 0
    bench.ledger.ended(2, bench.ledger.generation(2))
    assert bench.stage(StepPlan(4, decodes=(0, 2))).decode.slots == [0]


def test_a_later_chunk_takes_the_row_carried_for_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.stage(
        StepPlan(
            0,
            starts=(start(3, prompt_logprobs=1),),
            pages=pages(3, 0, 1),
            prefills=(PrefillChunk(3, tokens(5, 6, 7), 0, False),),
        )
    )
    assert first.prefill.carried == [(2, 3)]
    assert bench.host["prompt_rows"][:2].tolist() == [0, 1]
    assert bench.host["prompt_targets"][:2].tolist() == [6, 7]
    later = bench.stage(StepPlan(1, prefills=(PrefillChunk(3, tokens(8, 9), 3, True),)))
    assert later.prefill.carried == []
    assert later.prefill.prompt_entries == 2
    assert bench.host["prompt_rows"][:3].tolist() == [128 + 3, 0, 0]
    assert bench.host["prompt_targets"][:3].tolist() == [8, 9, -1]


def test_an_end_that_arrives_late_does_not_touch_the_slots_next_sequence(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    plan = StepPlan(
        0, starts=(start(0),), pages=pages(0, 0, 1), prefills=(PrefillChunk(0, tokens(5), 0, True),)
    )
    bench.stage(plan)
    old = bench.ledger.generation(0)
    bench.stage(plan)
    bench.ledger.ended(0, old)
    assert not bench.ledger.has_ended(0)


def test_no_buffer_overlaps_another(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    layout = Layout()
    bench.plan.reserve(layout)
    bench.plan.reserve_pages(layout, 3)
    places = sorted(layout.reservations.values(), key=lambda place: place.offset)
    for before, after in pairwise(places):
        assert before.offset + before.bytes <= after.offset
    kv = [place for place in places if place.part == "kv_pages"]
    assert sum(place.bytes for place in kv) == 3 * bench.plan.page_bytes()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.family in ("llama", "qwen2")], ids=lambda c: c.name
)
def test_rope_tables_turn_as_the_configuration_says(tmp_path: Path, case: Case) -> None:
    config = build_checkpoint(case, tmp_path / "model")
    mixer = config.layers[0].mixer
    cosines, sines = rope_values(mixer, 50)
    angles = np.arange(50)[:, None] * mixer.rope.inverse_frequencies().astype(np.float64)
    np.testing.assert_allclose(cosines, np.cos(angles) * mixer.rope.attention_factor, atol=1e-5)
    np.testing.assert_allclose(sines, np.sin(angles) * mixer.rope.attention_factor, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "feature"),
    [("gemma4", "softcapped logits|norms after"), ("qwen3_moe", "moe"), ("qwen3_5", "deltanet")],
)
def test_features_without_a_kernel_are_refused_by_name(tmp_path: Path, family: str, feature: str) -> None:
    case = next(case for case in CASES if case.family == family)
    config = build_checkpoint(case, tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=feature):
        require_supported(config)


def test_a_head_size_without_a_kernel_is_refused_by_name(tmp_path: Path) -> None:
    with open_checkpoint(make_tiny_checkpoint(tmp_path, hidden=64, heads=4)) as opened:
        assert opened.config.layers[0].mixer.head_dim == 16
        with pytest.raises(UnsupportedModelError, match="head_dim 16"):
            require_supported(opened.config)


def test_attention_that_grows_narrow_at_the_end_is_refused_by_name(tmp_path: Path) -> None:
    """Rows carried to the next pass stand behind the last layer's, where a wider layer would write."""
    with open_checkpoint(checkpoint(tmp_path)) as opened:
        config = opened.config
    first, *others, last = config.layers
    narrow = replace(last, mixer=replace(last.mixer, n_heads=last.mixer.n_heads // 2))
    require_supported(replace(config, layers=(replace(first, mixer=narrow.mixer), *others, last)))
    with pytest.raises(UnsupportedModelError, match="a last layer with narrower attention"):
        require_supported(replace(config, layers=(first, *others, narrow)))
