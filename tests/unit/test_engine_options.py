"""How many sequences and tokens an engine takes on: what was asked for, or what suits it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from engine.errors import ModelError
from engine.factory import load_engine
from engine.options import EngineOptions, KvDtype, Precision, StepSizes
from service import options as service_options
from service.options import ServeOptions, option_fields
from service.serve import worker_options
from worker.scheduling import options as scheduling_options

SUITED = StepSizes(max_sequences=16, max_step_tokens=2048, prefill_tokens_beside_decodes=32)
HOMES = {
    "reference": "engine.reference.engine",
    "cuda": "engine.cuda.settings",
    "simulated": "engine.simulated.engine",
}


@pytest.mark.parametrize(
    ("sequences", "tokens", "expected"),
    [
        (None, None, (16, 2048)),
        (3, None, (3, 2048)),
        (4000, None, (4000, 4000)),
        (None, 5000, (16, 5000)),
        (None, 7, (7, 7)),
        (7, 7, (7, 7)),
    ],
)
def test_what_is_not_chosen_suits_the_engine_and_what_is(
    sequences: int | None, tokens: int | None, expected: tuple[int, int]
) -> None:
    options = EngineOptions(Path(), max_sequences=sequences, max_step_tokens=tokens)
    sizes = options.sizes(SUITED)
    assert (sizes.max_sequences, sizes.max_step_tokens) == expected
    assert sizes.prefill_tokens_beside_decodes == 32


def test_a_step_without_room_for_all_is_refused() -> None:
    with pytest.raises(ModelError, match="max_step_tokens 7 has no room for a token of each of 8 sequences"):
        EngineOptions(Path(), max_sequences=8, max_step_tokens=7).sizes(SUITED)


@pytest.mark.parametrize("engine", ["reference", "simulated"])
def test_an_engine_takes_what_suits_it(tiny_checkpoint: Path, engine: str) -> None:
    suited = import_module(HOMES[engine]).SUITED_SIZES
    serving = worker_options(ServeOptions(engine=engine), tiny_checkpoint)  # type: ignore[arg-type]
    loaded = load_engine(serving.engine)
    capacity = loaded.capacity
    assert suited == StepSizes(
        capacity.slots, capacity.max_step_tokens, capacity.prefill_tokens_beside_decodes
    )
    loaded.close()


def test_the_service_offers_the_workers_prefill_policies() -> None:
    """Written twice: `slipstream --help` is not to wait for the worker's imports."""
    offered, known = service_options.PrefillPolicy, scheduling_options.PrefillPolicy
    assert get_args(offered) == get_args(known)


def test_the_service_offers_the_engines_precisions() -> None:
    assert get_args(service_options.PrecisionChoice) == tuple(Precision)
    assert get_args(service_options.KvDtypeChoice) == tuple(KvDtype)


def test_precisions_reach_the_engines_options() -> None:
    serving = worker_options(ServeOptions(precision="q4", kv_dtype="fp8"), Path())
    assert (serving.engine.precision, serving.engine.kv_dtype) == (Precision.Q4, KvDtype.FP8)


def test_help_tells_each_engines_sizes() -> None:
    """The service cannot ask the engines: their modules are heavy, and none of its business."""
    pytest.importorskip("cuda.bindings")
    cuda, reference, simulated = (
        import_module(HOMES[name]).SUITED_SIZES for name in ("cuda", "reference", "simulated")
    )
    texts = {item.name: item.about.help for item in option_fields()}
    assert cuda.max_sequences == simulated.max_sequences
    assert f"(reference {reference.max_sequences}, others {cuda.max_sequences})" in texts["max_sequences"]
    assert reference.max_step_tokens == simulated.max_step_tokens
    steps = f"(cuda {cuda.max_step_tokens}, others {reference.max_step_tokens})"
    assert steps in texts["max_step_tokens"]
    beside = (
        f"(reference {reference.prefill_tokens_beside_decodes}, cuda {cuda.prefill_tokens_beside_decodes})"
    )
    assert beside in texts["prefill_tokens_beside_decodes"]
