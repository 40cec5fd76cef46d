"""Writes tiny random GGUF files with the public writer: every supported type, tokenizer included.

The weights are those of scripts.random_checkpoint, so a GGUF file and a Hugging Face folder of the same
configuration and seed are the same model, up to quantization.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.config import AttentionSpec, ModelConfig
from engine.config.hugging_face import model_config_from_hf
from scripts.make_tiny_checkpoint import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tokenizer
from scripts.random_checkpoint import canonical_weights

_K_QUANTS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Types the public package cannot quantise, and where in a block their f16 scales stand."""

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma4_text": "gemma4",
}
_NAMES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "input_norm": "attn_norm",
    "feed_forward_norm": "ffn_norm",
    "post_mixer_norm": "post_attention_norm",
    "post_feed_forward_norm": "post_ffw_norm",
    "scalar": "layer_output_scale.weight",
    "attention.o": "attn_output",
    "moe.router": "ffn_gate_inp",
}


def write_gguf(path: Path, config: Mapping[str, Any], *, quant: str = "Q4_0", seed: int = 0) -> Path:
    """Writes a GGUF file of a Hugging Face configuration; matrices in `quant`, the rest in F32.

    `quant` is F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, or Q4_K, Q5_K, Q6_K, whose blocks are random
    bytes; rows must fill whole blocks.
    """
    model = model_config_from_hf(config)
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _write_settings(writer, model, config, architecture)
    _write_tokenizer(writer, model.vocab_size)
    _write_tensors(writer, model, architecture, quant, seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_settings(
    writer: gguf.GGUFWriter, model: ModelConfig, config: Mapping[str, Any], architecture: str
) -> None:
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionSpec)]
    first, last = mixers[0], mixers[-1]
    writer.add_name("tiny random model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.n_layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(first.n_heads)
    writer.add_layer_norm_rms_eps(model.final_norm.eps)
    writer.add_vocab_size(model.vocab_size)
    writer.add_key_length(last.head_dim)
    writer.add_value_length(last.head_dim)
    writer.add_rope_dimension_count(last.head_dim)
    assert last.rope is not None
    writer.add_rope_freq_base(last.rope.theta)
    windows = [mixer.window for mixer in mixers if mixer.window is not None]
    if windows:
        writer.add_sliding_window(windows[0])
    if architecture == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "gemma4":
        _write_gemma(writer, model, mixers)
    else:
        writer.add_head_count_kv(first.n_kv_heads)


def _write_gemma(writer: gguf.GGUFWriter, model: ModelConfig, mixers: list[AttentionSpec]) -> None:
    """Global layers under the plain keys, sliding ones under those with _swa."""
    last = mixers[-1]
    first = next(mixer for mixer in mixers if mixer.window is not None)
    assert first.rope is not None
    assert last.rope is not None
    writer.add_head_count_kv([mixer.n_kv_heads for mixer in mixers])
    writer.add_sliding_window_pattern([mixer.window is not None for mixer in mixers])
    writer.add_key_length_swa(first.head_dim)
    writer.add_value_length_swa(first.head_dim)
    writer.add_float32("gemma4.rope.freq_base_swa", first.rope.theta)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    writer.add_uint32("gemma4.attention.shared_kv_layers", 0)
    if model.logit_softcap is not None:
        writer.add_final_logit_softcapping(model.logit_softcap)
    rotated = last.rope.rotated_angles
    factors = [1.0] * rotated + [1e30] * (last.head_dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))


def _write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """As SmolLM2's files have it: byte-level BPE, pre-tokenizer "smollm", ChatML."""
    tokenizer = make_tokenizer(max(vocab_size, len(SPECIAL_TOKENS) + 257))
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])[:vocab_size]
    tokens = [token for token, _ in by_id]
    tokens += [f"<unused{index}>" for index in range(len(tokens), vocab_size)]
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    types = [control] * len(SPECIAL_TOKENS) + [normal] * (len(by_id) - len(SPECIAL_TOKENS))
    types += [unused] * (vocab_size - len(types))
    known = set(tokens)
    merges = [f"{a} {b}" for a, b in _merges(tokenizer) if a + b in known]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([int(token_type) for token_type in types])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _merges(tokenizer: Any) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def _write_tensors(
    writer: gguf.GGUFWriter, model: ModelConfig, architecture: str, quant: str, seed: int
) -> None:
    experts: dict[str, list[NDArray[np.float32]]] = {}
    for name, values in canonical_weights(model, seed):
        target, is_expert = _gguf_name(name)
        if architecture == "llama" and ".attention.q." in name:
            values = permute(values, _heads(model, name)[0])
        if architecture == "llama" and ".attention.k." in name:
            values = permute(values, _heads(model, name)[1])
        if is_expert:
            experts.setdefault(target, []).append(values)
        else:
            _add(writer, target, values, quant if values.ndim > 1 and ".router." not in name else "F32", seed)
    for target, parts in experts.items():
        _add(writer, target, np.stack(parts), quant, seed)


def permute(rows: NDArray[np.float32], n_heads: int) -> NDArray[np.float32]:
    """Rows of q or k as llama-style files have them: a head's halves interleaved, row by row."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _heads(model: ModelConfig, name: str) -> tuple[int, int]:
    mixer = model.layers[int(name.split(".")[1])].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer.n_heads, mixer.n_kv_heads


def _gguf_name(name: str) -> tuple[str, bool]:
    """(the tensor's name in the file, whether it is one expert of a stack)."""
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{_NAMES[parts[0]]}.{parts[1]}", False
    stem, suffix = ".".join(parts[2:]), ""
    for ending in (".weight", ".bias"):
        if stem.endswith(ending):
            stem, suffix = stem.removesuffix(ending), ending
    if stem.startswith("moe.experts."):
        return f"blk.{parts[1]}.ffn_{parts[-2]}_exps.weight", True
    own = stem.replace("attention.", "attn_").replace("feed_forward.", "ffn_")
    return f"blk.{parts[1]}.{_NAMES.get(stem, own)}{suffix}", False


def _add(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], quant: str, seed: int) -> None:
    if quant == "F32":
        writer.add_tensor(name, values)
    elif quant in _K_QUANTS:
        qtype = gguf.GGMLQuantizationType[quant]
        writer.add_tensor(name, random_blocks(values.shape, quant, seed), raw_dtype=qtype)
    else:
        qtype = gguf.GGMLQuantizationType[quant]
        writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)


def random_blocks(shape: tuple[int, ...], quant: str, seed: int) -> NDArray[np.uint8]:
    """Blocks of a K type with random bits and small scales, uint8 [..., row bytes]."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]]
    generator = np.random.Generator(np.random.PCG64(seed))
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    for offset in _K_QUANTS[quant]:
        scale = generator.uniform(1e-5, 1e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
