"""What must hold of a CUDA engine with e4m3 pages, with and without a GPU: the reference engine's
log-probabilities, whose cache is rounded alike.

Each scenario takes a loader of engines and an empty folder.
"""

from __future__ import annotations

from pathlib import Path

from engine.interface import Sampling
from engine.options import KvDtype
from tests.cuda_scenarios import Load, assert_close, checkpoint, options, prompt, reference
from tests.parity.reference_driver import Driver

FP8 = {"kv_dtype": KvDtype.FP8}


def chunks_fill_pages_by_and_by(load: Load, folder: Path) -> None:
    """Prompts of several segments a step, whose pages are written in several steps."""
    checkpoint(folder)
    sampling = Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2)
    wanted, found = reference(folder, **FP8), Driver(load(options(folder, **FP8)))
    for driver in (wanted, found):
        for slot, length in ((3, 150), (0, 1), (4, 23)):
            driver.start(slot, prompt(length), sampling)
        driver.prefill(3, 0, 4, chunk=29)
    for slot in (3, 0, 4):
        assert_close(found.prompt_logprobs[slot], wanted.prompt_logprobs[slot])
        assert_close(found.logprobs[slot], wanted.logprobs[slot])


def decoded_tokens_are_appended(load: Load, folder: Path) -> None:
    """Over a page's end, with biases that make keys grow; the reference follows the engine's own tokens."""
    checkpoint(folder, "qwen2", heads=8, kv_heads=1, layers=3)
    driver = Driver(load(options(folder, **FP8)))
    driver.start(2, prompt(61), Sampling(temperature=0.0, logprobs=20))
    driver.prefill(2)
    driver.decode(9, 2)
    forced = reference(folder, **FP8)
    forced.start(0, [*prompt(61), *driver.tokens[2]], Sampling(temperature=0.0, prompt_logprobs=20))
    forced.prefill(0)
    assert_close(driver.logprobs[2], forced.prompt_logprobs[0][60:])


def tokens_do_not_depend_on_company_or_shared_pages(load: Load, folder: Path) -> None:
    checkpoint(folder)
    alone = Driver(load(options(folder, **FP8)))
    alone.start(1, prompt(150))
    alone.prefill(1, chunk=64)
    alone.decode(6)
    crowd = Driver(load(options(folder, **FP8)))
    crowd.start(0, prompt(40, seed=1))
    crowd.start(2, prompt(150))
    crowd.prefill(0, chunk=40)
    crowd.prefill(2, chunk=64)
    crowd.decode(6)
    assert crowd.tokens[2] == alone.tokens[1]
    crowd.start(3, prompt(150), shared=crowd.pages[2][:2])
    crowd.prefill(3, chunk=64)
    crowd.decode(6, 3)
    assert crowd.tokens[3] == alone.tokens[1]


SCENARIOS = (
    chunks_fill_pages_by_and_by,
    decoded_tokens_are_appended,
    tokens_do_not_depend_on_company_or_shared_pages,
)
