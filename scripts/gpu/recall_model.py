"""A model whose next token is known beforehand, and exactly so on any engine, in any batch and precision.

Each attention head looks a fixed number of tokens back and recalls one digit (of base 16) of the token it
finds; each layer's feed-forward adds a permuted copy. The head scores every token by how well its digits, one
for each of the layers' places, agree with what was recalled. So a token hangs on hundreds of earlier ones,
through every layer's keys and values, and a stream that reads another's page, slot or position goes astray.

Nothing rounds: one constant outweighs all else in the residual stream, so that norms divide by 32; what is
left are small whole numbers, attention weights within e⁻²⁵ of 0 or 1, and weights that bf16, q4_0 and e4m3
hold exactly. Sums come out the same in any order. For prompts that begin with the token BOS. Knows no engine.

    PYTHONPATH=. python scripts/gpu/recall_model.py qwen3-1.7b FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from scripts.gpu.make_random_checkpoint import MODELS, write_tensors
from scripts.make_tiny_checkpoint import write_tokenizer

BASE = 16
BLOCK = 32
"""Of q4_0."""
PLACES = 4
"""Digits that a layer recalls; several heads add to each."""
BOS = 1
"""The first token of every prompt: heads that look too far back find it, and it has no digits."""
CONSTANT = 256.0
_GOLDEN = (5**0.5 - 1) / 2
_BOS_LOGIT = -128.0
"""It is never an answer's token."""
_RMS = 32.0
"""Of every row of the residual stream, but for less than one part in 2¹⁰ that bf16 rounds away."""
_LARGEST = 14.0
"""Of a normed row: 448 / 32, so that e4m3 has a scale that is a power of two."""
_GATE = 8.0
"""The other constant of a normed row."""
_PEAK = 320.0
"""Attention score of the token looked for; all others lie at least 25 below it or below BOS."""
NEAR = (0, 1, 2, 0, 3, 1, 5, 2, 0, 4, 1, 8, 63, 64, 65, 128)
"""How far back every other head looks: little, for short prompts, and over the edges of pages."""
FAR = (16, 1024)
"""The others: any distance between, evenly by its logarithm."""
TINY: dict[str, Any] = MODELS["qwen3-1.7b"] | {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rope_theta": 1e4,
}
"""A config for tests, of 8 heads in 2 layers."""


BF16 = ml_dtypes.bfloat16
Values = NDArray[Any]
"""bf16."""


@dataclass(frozen=True)
class Recall:
    """What such a model of given sizes recalls. Its arrays follow from the sizes and the seed."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    theta: float
    seed: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], seed: int = 0) -> Recall:
        """Raises ValueError for sizes that have no room for it."""
        model = cls(
            config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"],
            config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"],
            config["vocab_size"], config["rope_theta"], seed,
        )  # fmt: skip
        if model.hidden % 64 or model.place(model.layers) > model.hidden or model.heads % PLACES:
            raise ValueError(f"hidden size {model.hidden} has no room for {model.layers} layers' digits")
        if model.intermediate <= PLACES * BASE:
            raise ValueError(f"intermediate size {model.intermediate} is not above {PLACES * BASE}")
        return model

    @property
    def digits(self) -> int:
        """Of a token, as heads can recall them: one head's values hold them all."""
        return self.head_dim // BASE

    @property
    def constants(self) -> int:
        """Elements of the residual stream that hold CONSTANT, for tokens and for BOS each."""
        return self.hidden * int(_RMS * _RMS) // int(CONSTANT * CONSTANT)

    def place(self, layer: int) -> int:
        """First element of the residual stream that is the layer's; a block of q4_0 begins there."""
        before = self.digits * BASE + 2 * self.constants
        return before + -before % BLOCK + layer * PLACES * BASE

    def look(self, layer: int, head: int) -> tuple[int, int, int]:
        """(tokens back, which digit, the layer's place it is added to)."""
        index = layer * self.heads + head
        back = NEAR[index // 2 % len(NEAR)]
        if index % 2:
            back = int(FAR[0] * (FAR[1] / FAR[0]) ** (index * _GOLDEN % 1))
        return back, (index * 3 + layer) % self.digits, head * PLACES // self.heads

    def codes(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
        """Digits as recalled [vocab, digits], as scored [vocab, layers · PLACES], and the latter's weights.

        Weights differ, so that ties are rare: 1 … 2 in 16 steps for every other place, and the next one's,
        which shares a block of q4_0, some eighths of it.
        """
        random = np.random.default_rng(self.seed)
        places = self.layers * PLACES
        recalled = random.integers(0, BASE, (self.vocab, self.digits), np.uint8)
        scored = random.integers(0, BASE, (self.vocab, places), np.uint8)
        weights = random.integers(16, 32, (self.vocab, places)).astype(np.float32) / 16
        weights[:, 1::2] = weights[:, ::2] * random.integers(4, 9, (self.vocab, places // 2)) / 8
        return recalled, scored, weights

    def permutation(self, layer: int) -> NDArray[np.intp]:
        """Of a layer's PLACES · BASE elements: where the feed-forward adds each once more."""
        return np.random.default_rng((self.seed, layer)).permutation(PLACES * BASE)

    @property
    def unit(self) -> float:
        """Of the logits: a power of two that leaves the likeliest tokens a few tenths of a nat apart."""
        spread = 1.5 * np.sqrt(self.layers * PLACES * 2 * (self.heads / PLACES) / BASE)
        return float(2.0 ** np.round(np.log2(1.4 / spread)))

    def logits(self, tokens: Sequence[int], codes: tuple[Any, Any, Any] | None = None) -> NDArray[np.float32]:
        """float32 [vocab] after tokens that begin with BOS."""
        recalled, scored, weights = codes or self.codes()
        counts = np.zeros((self.layers, PLACES, BASE), np.float32)
        for layer in range(self.layers):
            for head in range(self.heads):
                back, digit, place = self.look(layer, head)
                if back < len(tokens) - 1:
                    counts[layer, place, recalled[tokens[-1 - back], digit]] += 1
            flat = counts[layer].reshape(-1)
            flat += flat[np.argsort(self.permutation(layer))]
        flat = counts.reshape(-1, BASE)
        found = flat[np.arange(len(flat)), scored]
        logits = (found * weights).sum(1, dtype=np.float64).astype(np.float32) * np.float32(self.unit)
        logits[BOS] = _BOS_LOGIT
        return logits

    def tensors(self) -> Iterator[tuple[str, Values]]:
        """Every tensor's name in the file and its leading rows, past which all is zero."""
        recalled, scored, weights = self.codes()
        first = self.digits * BASE
        everything = np.zeros((self.vocab, self.hidden), BF16)
        rows = np.arange(self.vocab)[:, None]
        everything[rows, np.arange(self.digits) * BASE + recalled] = 1
        everything[:, first : first + self.constants] = CONSTANT
        everything[BOS] = 0
        everything[BOS, first + self.constants : first + 2 * self.constants] = CONSTANT
        yield "model.embed_tokens.weight", everything
        for layer in range(self.layers):
            for name, values in self._layer(layer):
                yield f"model.layers.{layer}.{name}.weight", values
        norm = (self._norm().astype(np.float32) * np.float32(self.unit)).astype(BF16)
        norm[first : first + 2 * self.constants] = _RMS / CONSTANT
        yield "model.norm.weight", norm
        everything[:] = 0
        everything[rows, self.place(0) + np.arange(self.layers * PLACES) * BASE + scored] = weights
        everything[BOS] = 0
        everything[BOS, first] = _BOS_LOGIT
        yield "lm_head.weight", everything

    def _norm(self) -> Values:
        """Undoes the division by 32; constants come out as _LARGEST and, the last, as _GATE."""
        norm = np.full(self.hidden, _RMS, BF16)
        first = self.digits * BASE
        for start in (first, first + self.constants):
            norm[start : start + self.constants] = _LARGEST * _RMS / CONSTANT
            norm[start + self.constants - 1] = _GATE * _RMS / CONSTANT
        return norm

    def _layer(self, layer: int) -> Iterator[tuple[str, Values]]:
        yield "input_layernorm", self._norm()
        yield "post_attention_layernorm", self._norm()
        yield from self._scores(layer)
        first = self.digits * BASE
        values = np.zeros((self.kv_heads, self.head_dim, self.hidden), BF16)
        values[:, np.arange(first), np.arange(first)] = 1
        yield "self_attn.v_proj", values.reshape(-1, self.hidden)
        out = np.zeros((self.hidden, self.heads, self.head_dim), BF16)
        for head in range(self.heads):
            _, digit, place = self.look(layer, head)
            at = self.place(layer) + place * BASE
            out[at + np.arange(BASE), head, digit * BASE + np.arange(BASE)] = 1
        yield "self_attn.o_proj", out.reshape(self.hidden, -1)
        yield from self._feed_forward(layer)

    def _scores(self, layer: int) -> Iterator[tuple[str, Values]]:
        """Queries and keys hang on nothing but position, and on whether a key is that of BOS."""
        half = self.head_dim // 2
        share, frequency, sink = score_shares(self.theta, self.head_dim)
        constant = self.digits * BASE + self.constants - 1
        queries = np.zeros((self.heads, self.head_dim, self.hidden), BF16)
        for head in range(self.heads):
            back = self.look(layer, head)[0]
            queries[head, : len(share), constant] = np.sqrt(share) * np.cos(back * frequency)
            queries[head, half : half + len(share), constant] = -np.sqrt(share) * np.sin(back * frequency)
            queries[head, half - 1, constant] = sink
        yield "self_attn.q_proj", queries.reshape(-1, self.hidden)
        keys = np.zeros((self.kv_heads, self.head_dim, self.hidden), BF16)
        keys[:, : len(share), constant] = np.sqrt(share)
        keys[:, half - 1, constant + self.constants] = 1
        yield "self_attn.k_proj", keys.reshape(-1, self.hidden)
        scale = np.sqrt(_PEAK * np.sqrt(1 + sink * sink) / np.sqrt(self.head_dim))
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}", np.full(self.head_dim, scale, BF16)

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, Values]]:
        """SwiGLU with a gate of 32, where SiLU changes nothing; one more neuron sets the largest value."""
        count = PLACES * BASE
        constant = self.digits * BASE
        gate = np.zeros((count + 1, self.hidden), BF16)
        gate[:, constant + self.constants - 1] = 4
        yield "mlp.gate_proj", gate
        up = np.zeros((count + 1, self.hidden), BF16)
        up[np.arange(count), self.place(layer) + np.arange(count)] = 1
        up[count, constant] = 1
        yield "mlp.up_proj", up
        down = np.zeros((self.hidden, self.intermediate), BF16)
        down[self.place(layer) + self.permutation(layer), np.arange(count)] = 1 / 32
        yield "mlp.down_proj", down


def score_shares(theta: float, head_dim: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """(how much each of the fastest pairs adds to a score, their frequencies, the share of BOS).

    The shares add up to 1, reached at the distance looked for; elsewhere the sum stays below 0.82, and BOS,
    by the slowest pair, has what lies in the middle between.
    """
    frequency = theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
    frequency = frequency[frequency > 0.1]
    share = frequency**0.75
    share /= share.sum()
    away = np.cos(np.arange(1, 4096)[:, None] * frequency) @ share
    return share, frequency, float(1 + away.max()) / 2


def make_recall_model(folder: Path, config: Mapping[str, Any]) -> Recall:
    """Writes the model of a Qwen3 config into `folder` (made if need be); its head is never tied."""
    config = {**config, "tie_word_embeddings": False}
    model = Recall.of(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": BOS, "eos_token_id": [2, 0], "pad_token_id": 2})
    )
    write_tokenizer(folder, 320)
    write_tensors(folder, config, model.tensors())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=[name for name in MODELS if name.startswith("qwen3")])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_recall_model(arguments.folder, MODELS[arguments.model])
    print(arguments.folder, file=sys.stderr)


if __name__ == "__main__":
    main()
