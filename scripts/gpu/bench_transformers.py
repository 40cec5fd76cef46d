"""The peer: transformers on the same checkpoints and shapes as bench_engine.py, in rows of the same names.

    PYTHONPATH=. python scripts/gpu/bench_transformers.py --out build/bench [--models qwen3-1.7b qwen3-8b]
    PYTHONPATH=. python scripts/gpu/bench_transformers.py --device cpu --dtype float32 --models tiny --quick

bf16 weights, a static key-value cache, attention by scaled_dot_product_attention. Decode runs in a CUDA graph
of the plain step, and, while --budget lasts, with torch.compile ("reduce-overhead"); the better of the two is
the figure, and its note tells the other, or why it did not run. Greedy, the next token chosen on the device.
Prefill is never compiled: transformers compiles none. Each figure is written as soon as there is one. Needs
torch and transformers (4.50 or newer, 5 too); of this project only the maker of random checkpoints.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
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
COMPILE_S = 30
"""Compiling is not begun with less time left."""
PREFILL, PREFILL_ROWS = 2048, 8
WIDTHS = (1, 8, 64)
At = tuple[torch.Tensor, torch.Tensor]
"""Tokens int64 [rows, 1] and their position int64 [1]."""
Advance = Callable[[torch.Tensor, torch.Tensor, int], At]
"""So many steps from a token and its position."""


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


class Decoding:
    """Decode steps of `rows` sequences, context 128 → 384, on one cache: graphs hold its addresses."""

    def __init__(self, peer: Peer, rows: int, options: argparse.Namespace) -> None:
        self._peer, self._rows, self._options = peer, rows, options
        self._cache = peer.cache(PROMPT + options.steps)
        self._prompts = peer.prompts(rows, PROMPT)
        self._rates: dict[str, list[float]] = {}
        self._told: list[str] = []

    def run(self, name: str) -> None:
        """One way of decoding, by name: "CUDA graph", "compiled" or "plain". One that fails is told."""
        arms = {"CUDA graph": self._graphed, "compiled": self._compiled, "plain": lambda: self._plain}
        left = self._options.end - time.monotonic()
        if name == "compiled" and left < COMPILE_S:
            self._told.append(f"compiled: not run, {max(left, 0):.0f} s left")
            return
        try:
            self._rates[name] = self._measure(arms[name]())
        except Exception as error:  # noqa: BLE001 - whatever cannot be captured or compiled can be run plainly
            traceback.print_exc()
            self._told.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")

    def figure(self, name: str) -> Figure:
        """The fastest way's; the note tells the others. Runs the plain one if no other ran."""
        if not self._rates:
            self.run("plain")
        best = max(self._rates, key=lambda way: statistics.median(self._rates[way]))
        others = [f"{way} {statistics.median(runs):,.5g}" for way, runs in self._rates.items() if way != best]
        return _row(
            name, "tok/s", self._rates[best], "; ".join([f"static cache, {best}", *others, *self._told])
        )

    def _measure(self, advance: Advance) -> list[float]:
        """Tokens/s of each repeat. The first, which compiles and captures, is not counted."""
        rates = []
        timed = self._options.steps - 4
        for repeat in range(self._options.repeats + 1):
            token, position = advance(*self._start(), 4)
            seconds = self._peer.seconds(lambda at=(token, position): advance(*at, timed))
            if repeat:
                rates.append(self._rows * timed / seconds)
        return rates

    def _start(self) -> At:
        self._cache.reset()
        token = self._peer.prefill(self._prompts, self._cache)
        return token.clone(), torch.full((1,), PROMPT, dtype=torch.int64, device=self._peer.device)

    def _plain(self, token: torch.Tensor, position: torch.Tensor, steps: int) -> At:
        return self._call(self._peer.step, token, position, steps)

    def _compiled(self) -> Advance:
        torch._dynamo.reset()  # or the next width is compiled for any width
        step = torch.compile(self._peer.step, mode="reduce-overhead", dynamic=False)
        return lambda token, position, steps: self._call(step, token, position, steps)

    def _call(self, step: Callable[..., Any], token: torch.Tensor, position: torch.Tensor, steps: int) -> At:
        for _ in range(steps):
            token = step(token, position, self._cache).clone()
            position = position + 1
        return token, position

    def _graphed(self) -> Advance:
        """One CUDA graph of a plain step, which feeds its token to itself and steps its position forward."""
        token, position = self._start()
        side = torch.cuda.Stream()  # twice on another stream before a capture, as torch asks
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._peer.step(token, position, self._cache)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(self._peer.step(token, position, self._cache))
            position.add_(1)

        def advance(start: torch.Tensor, at: torch.Tensor, steps: int) -> At:
            token.copy_(start)
            position.copy_(at)
            for _ in range(steps):
                graph.replay()
            return token.clone(), position.clone()

        self._compare(advance)
        return advance

    def _compare(self, advance: Advance) -> None:
        """Tells how many tokens are the plain step's: a graph that replays something else is no peer."""
        tokens = []
        for way in (self._plain, advance):
            at, found = self._start(), []
            for _ in range(8):
                at = way(*at, 1)
                found.append(at[0])
            tokens.append(torch.cat(found, 1))
        same = int((tokens[0] == tokens[1]).sum())
        self._told.append(f"{same} of {tokens[0].numel()} tokens as without the graph")


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


def measure(name: str, folder: Path, options: argparse.Namespace, keep: Callable[[Figure], None]) -> None:
    """All rows of one model, each kept at once. A part that fails is told in the others' stead."""
    failures: list[str] = options.failures
    with torch.no_grad():
        began = time.perf_counter()
        peer = Peer(folder, options)
        peer.wait()
        keep(Figure(f"{name} weights loaded", "s", (time.perf_counter() - began,)))
        if options.device == "cpu":  # on a GPU, rounding that depends on shapes may part them
            check_tokens(peer)
        with _telling(f"{name} prefill", failures):
            rates, first = prefill(peer, options)
            keep(_row(f"{name} prefill {PREFILL_ROWS} × {options.prefill:,}", "tok/s", rates))
            keep(_row(f"{name} first token of {options.prefill:,}", "ms", first))
        decodings = {rows: Decoding(peer, rows, options) for rows in options.widths}
        for way in (["CUDA graph"] if options.device == "cuda" else []) + ["compiled"] * options.compile:
            for rows, decoding in decodings.items():
                with _telling(f"{name} decode ×{rows} {way}", failures):
                    decoding.run(way)
                    keep(decoding.figure(f"{name} decode ×{rows}"))
    del peer, decodings
    gc.collect()
    torch._dynamo.reset()
    if options.device == "cuda":
        torch.cuda.empty_cache()


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
    options.end = time.monotonic() + options.budget
    figures: dict[str, Figure] = {}

    def keep(figure: Figure) -> None:
        figures[figure.name] = figure
        _write(options, list(figures.values()))

    for name in options.models:
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=in_memory) as temporary:
            folder = (options.checkpoints or Path(temporary)) / name
            with _telling(name, options.failures):
                if not (folder / "config.json").exists():
                    make_checkpoint(name, folder)
                measure(name, folder, options, keep)
            _write(options, list(figures.values()))
    print(table(list(figures.values())))
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
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints by model, to keep")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--steps", type=int, default=STEPS, help="decode steps")
    parser.add_argument("--prefill", type=int, default=PREFILL, help="tokens of a prompt")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--budget", type=float, default=400, help="seconds after which nothing is compiled")
    parser.add_argument("--quick", action="store_true", help="one short repeat, to try the script")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps, options.prefill, options.widths = 1, 12, 64, (1, 2)
    return options


if __name__ == "__main__":
    sys.exit(main())
