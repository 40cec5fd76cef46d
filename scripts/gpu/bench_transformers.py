"""The peer: transformers on the same checkpoints and shapes as bench_engine.py, in rows of the same names.

    PYTHONPATH=. python scripts/gpu/bench_transformers.py --out build/bench [--models qwen3-1.7b qwen3-8b]
    PYTHONPATH=. python scripts/gpu/bench_transformers.py --device cpu --dtype float32 --models tiny --quick

bf16 weights, a static key-value cache, attention by scaled_dot_product_attention. Decode runs with
torch.compile in CUDA graphs ("reduce-overhead") if it will; if it fails, plainly, and the note of the figure
says why. Greedy, the next token chosen on the device. Prefill is never compiled: transformers compiles none.
Needs torch and transformers (4.50 or newer, 5 too); of this project only the maker of random checkpoints.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StaticCache

from scripts.benchmark.figures import Figure, table

PROMPT, STEPS = 128, 256
PREFILL, PREFILL_ROWS = 2048, 8
WIDTHS = (1, 8, 64)


class Peer:
    """One model on one device."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        )
        self.model = self.model.to(self.device).eval()
        known = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._takes_cache_position = "cache_position" in known
        self.vocab = self.model.config.vocab_size
        self._random = torch.Generator().manual_seed(0)

    def prompts(self, rows: int, length: int) -> torch.Tensor:
        """Random tokens, int64 [rows, length]."""
        tokens = torch.randint(3, self.vocab, (rows, length), generator=self._random)
        return tokens.to(self.device)

    def prefill(self, prompts: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        """Next tokens, int64 [rows, 1]. Only the last row's logits are computed."""
        return self.step(prompts, torch.arange(prompts.shape[1], device=self.device), cache)

    def cache(self, length: int) -> StaticCache:
        return StaticCache(config=self.model.config, max_cache_len=length)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        """Tokens int64 [rows, n] at positions int64 [n] give the next, int64 [rows, 1]."""
        places = {"cache_position": positions} if self._takes_cache_position else {}
        output = self.model(
            tokens,
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
            **places,
        )
        return output.logits[:, -1].argmax(-1, keepdim=True)

    def seconds(self, run: Callable[[], Any]) -> float:
        """Wall time, the device's work included."""
        self.wait()
        began = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def decode(peer: Peer, rows: int, options: argparse.Namespace) -> tuple[list[float], str]:
    """Tokens/s of each repeat, context 128 → 384, and how it ran."""
    if options.compile:
        try:
            torch._dynamo.reset()  # or the next width is compiled for any width
            compiled = torch.compile(peer.step, mode="reduce-overhead", dynamic=False)
            return _decode_runs(peer, compiled, rows, options), "static cache, compiled"
        except Exception as error:  # noqa: BLE001 - whatever it cannot compile, it can run
            reason = f"not compiled: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            torch._dynamo.reset()
            return _decode_runs(peer, peer.step, rows, options), f"static cache, {reason}"
    return _decode_runs(peer, peer.step, rows, options), "static cache, not compiled"


def _decode_runs(peer: Peer, step: Callable[..., Any], rows: int, options: argparse.Namespace) -> list[float]:
    """The cache is kept from run to run: graphs hold its addresses."""
    cache = peer.cache(PROMPT + options.steps)
    prompts = peer.prompts(rows, PROMPT)
    rates = []
    for repeat in range(options.repeats + 1):
        cache.reset()
        token = peer.prefill(prompts, cache)
        position = torch.full((1,), PROMPT, dtype=torch.int64, device=peer.device)
        for _ in range(4):
            token = step(token, position, cache).clone()
            position += 1

        def run(token: torch.Tensor = token, position: torch.Tensor = position) -> None:
            for _ in range(options.steps - 4):
                token = step(token, position, cache).clone()
                position += 1

        seconds = peer.seconds(run)
        if repeat:  # the first compiles and captures
            rates.append(rows * (options.steps - 4) / seconds)
    return rates


def prefill(peer: Peer, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Tokens/s over all prompts in one pass, and milliseconds to the first token of one."""
    length = options.prefill
    together, alone = peer.cache(length), peer.cache(length)
    many, one = peer.prompts(PREFILL_ROWS, length), peer.prompts(1, length)
    rates, first = [], []
    for repeat in range(options.repeats + 1):
        together.reset()
        alone.reset()
        seconds = peer.seconds(lambda: peer.prefill(many, together).cpu())
        first_s = peer.seconds(lambda: peer.prefill(one, alone).cpu())
        if repeat:
            rates.append(PREFILL_ROWS * length / seconds)
            first.append(1e3 * first_s)
    return rates, first


def measure(name: str, folder: Path, options: argparse.Namespace) -> list[Figure]:
    """All rows of one model. A part that fails is told in the others' stead."""
    figures: list[Figure] = []
    failures: list[str] = options.failures
    with torch.no_grad():
        began = time.perf_counter()
        peer = Peer(folder, options)
        peer.wait()
        figures.append(Figure(f"{name} weights loaded", "s", (time.perf_counter() - began,)))
        if options.device == "cpu":  # on a GPU, rounding that depends on shapes may part them
            check_tokens(peer)
        for rows in options.widths:
            with _telling(f"{name} decode ×{rows}", failures):
                rates, how = decode(peer, rows, options)
                figures.append(_row(f"{name} decode ×{rows}", "tok/s", rates, how))
        with _telling(f"{name} prefill", failures):
            rates, first = prefill(peer, options)
            figures.append(_row(f"{name} prefill {PREFILL_ROWS} × {options.prefill:,}", "tok/s", rates))
            figures.append(_row(f"{name} first token of {options.prefill:,}", "ms", first))
    del peer
    gc.collect()
    torch._dynamo.reset()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return figures


def _row(name: str, unit: str, runs: Sequence[float], note: str = "") -> Figure:
    figure = Figure(name, unit, tuple(runs), note=note)
    print(f"    {name}: {figure.median:,.5g} {unit}  {note}", flush=True)
    return figure


class _telling:  # noqa: N801 - reads as the statement it is
    """Keeps a failure of one part from stopping the others."""

    def __init__(self, part: str, failures: list[str]) -> None:
        self._part, self._failures = part, failures

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        text = "".join(traceback.format_exception(error))
        self._failures.append(f"{self._part}: {text}")
        print(text, flush=True)
        return True


def check_tokens(peer: Peer) -> None:
    """The loop here must choose what transformers' own generate() chooses. Raises AssertionError."""
    prompts, cache, tokens = peer.prompts(2, 20), peer.cache(40), []
    token = peer.prefill(prompts, cache)
    for position in range(20, 32):
        tokens.append(token)
        token = peer.step(token, torch.tensor([position], device=peer.device), cache)
    own = peer.model.generate(prompts, max_new_tokens=12, min_new_tokens=12, do_sample=False)[:, 20:]
    assert torch.equal(torch.cat(tokens, 1), own), "the loop and generate() choose different tokens"


def make_checkpoint(name: str, folder: Path) -> None:
    """The same random weights that bench_engine.py measures with; "tiny" to try this script."""
    if name == "tiny":
        from scripts.make_tiny_checkpoint import make_tiny_checkpoint

        make_tiny_checkpoint(folder, family="qwen3", head_dim=64)
        return
    from scripts.gpu.make_random_checkpoint import make_random_checkpoint

    make_random_checkpoint(folder, name)


def main() -> int:
    options = _options()
    options.failures = []
    figures: list[Figure] = []
    for name in options.models:
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=in_memory) as folder:
            with _telling(name, options.failures):
                make_checkpoint(name, Path(folder))
                figures += measure(name, Path(folder), options)
            _write(options, figures)
    print(table(figures))
    return 1 if options.failures else 0


def _write(options: argparse.Namespace, figures: Sequence[Figure]) -> None:
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "device": device}
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": versions,
        "figures": [figure.as_json() for figure in figures],
        "failures": options.failures,
    }
    (options.out / "transformers.json").write_text(json.dumps(document, indent=1, ensure_ascii=False))
    heading = ", ".join(f"{key} {value}" for key, value in versions.items())
    (options.out / "transformers.md").write_text(f"{heading}\n\n{table(figures)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", default=["qwen3-1.7b", "qwen3-8b"])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--steps", type=int, default=STEPS, help="decode steps")
    parser.add_argument("--prefill", type=int, default=PREFILL, help="tokens of a prompt")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="one short repeat, to try the script")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps, options.prefill, options.widths = 1, 12, 64, (1, 2)
    return options


if __name__ == "__main__":
    sys.exit(main())
