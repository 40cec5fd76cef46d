"""Makes a tiny random model in well under a second: a whole Hugging Face folder, tokenizer included.

For tests and first tries: it answers nonsense, but it is loaded, tokenized and served like any other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.random_checkpoint import write_random_checkpoint

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. A stream carries tokens from the worker to the client.",
    "user assistant system: please write a story about the river and the sea, and then count to one hundred.",
    "There was once a small model that knew only a few words, and it said them again and again and again.",
    "Pages hold keys and values; a slot holds one sequence; the scheduler plans the next step of the batch.",
)


def make_tiny_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    max_length: int = 2048,
    tied: bool = False,
    family: str = "llama",
    dtype: str = "bf16",
    shards: int = 1,
) -> Path:
    """Writes the model into `folder` (made if need be) and returns it.

    `family` is llama, mistral, qwen2 or qwen3; dtype f32, f16 or bf16; vocab_size ≥ 260. The tokenizer
    may know fewer tokens than vocab_size. Raises ValueError for other values.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(family) | {
        "hidden_size": hidden,
        "intermediate_size": intermediate or 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    write_random_checkpoint(folder, config, seed=seed, dtype=dtype, shards=shards)
    write_tokenizer(folder, vocab_size)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2, "do_sample": True},
    )
    return folder


def _config(family: str) -> dict[str, Any]:
    architectures = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    if family not in architectures:
        raise ValueError(f"family must be one of {', '.join(architectures)}, not {family!r}")
    return {"architectures": [architectures[family]], "model_type": family, "hidden_act": "silu"}


def make_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE tokenizer: three special tokens, 256 bytes, and merges up to vocab_size."""
    if vocab_size < len(SPECIAL_TOKENS) + 257:
        raise ValueError(f"vocab_size must be at least {len(SPECIAL_TOKENS) + 257}, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json."""
    make_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="llama")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16", "f32"))
    for name, default in (
        ("seed", 0),
        ("vocab-size", 320),
        ("layers", 2),
        ("hidden", 64),
        ("heads", 4),
        ("kv-heads", 2),
        ("max-length", 2048),
        ("shards", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    print(make_tiny_checkpoint(options.pop("folder"), **options))


if __name__ == "__main__":
    main()
