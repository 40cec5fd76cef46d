"""The scripts for machines with a GPU, as far as they run without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.factory import load_engine
from engine.interface import Engine
from engine.options import EngineOptions
from scripts.gpu import check_smollm2

PROMPTS = ([5, 9, 200, 31], [7, 7, 300])
TOKENS = 6


@pytest.fixture
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    engine = load_engine(
        EngineOptions(tiny_checkpoint, engine="reference", max_sequences=2, max_sequence_length=64, threads=1)
    )
    yield engine
    engine.close()


def test_an_answer_holds_that_equals_and_one_does_not_that_no_rounding_explains(engine: Engine) -> None:
    right, other = check_smollm2.decode(engine, PROMPTS, TOKENS)
    wrong = [*other[:3], (other[3] + 1) % 300, *other[4:]]
    cases = [
        {"prompt": prompt, "tokens": tokens, "smallest_margin": 0.0}
        for prompt, tokens in zip(PROMPTS, (right, wrong), strict=True)
    ]
    report = check_smollm2.check(engine, cases, noise=1e-3)
    first, second = report["prompts"]
    assert (first["agreeing"], first["holds"], first["widest_gap"]) == (TOKENS, True, 0.0)
    assert (second["agreeing"], second["holds"]) == (3, False)
    assert second["widest_gap"] > 1e-3
    assert (report["equal"], report["holds"]) == (1, False)
    assert check_smollm2.check(engine, cases, noise=100.0)["holds"]
    assert "**wrong**" in check_smollm2.as_table(report)


def test_pieces_of_a_model_are_joined_in_order(tmp_path: Path) -> None:
    whole = bytes(range(256)) * 40
    parts = [tmp_path / name for name in ("part.aa", "part.ab", "part.ac")]
    for index, part in enumerate(parts):
        part.write_bytes(whole[index * 4000 : (index + 1) * 4000])
    with ExitStack() as stack:
        joined = check_smollm2.join(list(reversed(parts)), stack)
        assert joined.read_bytes() == whole
    assert not joined.exists()
