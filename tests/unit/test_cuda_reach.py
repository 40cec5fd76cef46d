"""Ways to decode that give the same tokens: a long sequence among others, and a device without clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("nvmath")

from kernels import attention_step
from tests.cuda_scenarios import Load, checkpoint, options, prompt
from tests.parity.reference_driver import Driver
from tests.unit.cuda_twin import HOPPER, HostDevice, HostLibrary, load_twin

__all__ = ["load_twin"]
SLOTS = 12
"""Enough that not every row gets the most blocks."""


def decoded(load: Load, folder: Path, longest: int) -> tuple[dict[int, list[int]], int]:
    """Tokens by slot, and how many decode programs it took."""
    engine = load(options(folder, max_sequences=SLOTS, kv_pages=40))
    driver = Driver(engine)
    programs = engine.parts.programs.decode  # type: ignore[attr-defined]
    before = len(programs)
    for slot in range(SLOTS):
        driver.start(slot, prompt(40 if slot else longest, seed=slot))
    driver.prefill(*range(SLOTS), chunk=8)
    driver.decode(6)
    return dict(driver.tokens), len(programs) - before


def test_a_long_sequence_among_others(
    tmp_path: Path, load_twin: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path)
    alike, none_more = decoded(load_twin, tmp_path, 150)
    monkeypatch.setattr(attention_step, "KEYS_PER_BLOCK", 8)
    mixed, one_more = decoded(load_twin, tmp_path, 150)
    assert mixed == alike
    assert (none_more, one_more) == (0, 1), "the program for long sequences is made when it is first needed"
    assert decoded(load_twin, tmp_path, 40)[1] == 0, "sequences of a size need it not, however long they are"


def test_a_device_without_clusters(tmp_path: Path, load_twin: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes in three launches a layer, over lists of splits."""
    checkpoint(tmp_path)
    with_clusters, _ = decoded(load_twin, tmp_path, 150)
    asked_before = len(HostLibrary.names)
    monkeypatch.setattr(HostDevice, "limits", replace(HOPPER, compute_capability=(8, 0)))
    without, programs = decoded(load_twin, tmp_path, 150)
    asked = {name.partition("<")[0] for name in HostLibrary.names[asked_before:]}
    assert {"plan_decode", "attention_decode", "merge_splits"} <= asked
    assert "attention_step" not in asked
    assert (without, programs) == (with_clusters, 0)
