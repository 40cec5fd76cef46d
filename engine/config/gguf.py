"""GGUF metadata to a ModelConfig: rewritten as the configuration of the same family, then read as that.

So a family is described once. What GGUF tells by the presence of a tensor (biases, a head of its own)
comes in as the tensors' shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.config.hugging_face import model_config_from_hf
from engine.config.model import AttentionSpec, LayerSpec, ModelConfig
from engine.config.reader import REQUIRED, Section
from engine.errors import UnsupportedModelError

Shapes = Mapping[str, tuple[int, ...]]


def model_config_from_gguf(
    metadata: Mapping[str, object],
    *,
    tensor_shapes: Shapes,
    frequency_factors: tuple[float, ...] = (),
    where: str = "GGUF metadata",
) -> ModelConfig:
    """Reads a GGUF file's metadata. Raises UnsupportedModelError, ConfigError.

    `frequency_factors` are the numbers of a tensor `rope_freqs.weight`, if the file has one.
    """
    section = Section(metadata, where)
    architecture = section.string("general.architecture", REQUIRED)
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    settings = _ARCHITECTURES[architecture](_Keys(section, architecture), tensor_shapes)
    model = model_config_from_hf(settings, where=where)
    layers = tuple(_with_factors(section, layer, frequency_factors) for layer in model.layers)
    return replace(model, architecture=architecture, layers=layers)


class _Keys:
    """The keys of one architecture: `llama.block_count` and the like."""

    def __init__(self, section: Section, architecture: str) -> None:
        self.section = section
        self.architecture = architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def integer(self, key: str) -> int:
        return self.section.integer(self.name(key), REQUIRED)

    def maybe_integer(self, key: str) -> int | None:
        """None where the key is absent or 0."""
        return self.section.integer(self.name(key), None, minimum=0) or None

    def number(self, key: str) -> float:
        return self.section.number(self.name(key), REQUIRED)

    def maybe_number(self, key: str) -> float | None:
        return self.section.number(self.name(key), None)

    def refuse(self, *keys: str, neutral: float = 0.0) -> None:
        """Raises UnsupportedModelError for a key whose meaning is not implemented, unless it says nothing."""
        for key in keys:
            value = self.section.values.get(self.name(key))
            if value not in (None, 0, neutral):
                raise UnsupportedModelError(
                    f"{self.section.where}: {self.name(key)} = {value!r} is not supported"
                )


def _shared(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    """What all architectures state alike."""
    keys.refuse("attention.clamp_kqv", "attention.max_alibi_bias", "attn_logit_softcapping")
    keys.refuse("logit_scale", "residual_scale", "embedding_scale", neutral=1.0)
    return {
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": keys.integer("attention.head_count"),
        "intermediate_size": keys.maybe_integer("feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": shapes["token_embd.weight"][0] if "token_embd.weight" in shapes else None,
        "tie_word_embeddings": "output.weight" not in shapes,
        "sliding_window": keys.maybe_integer("attention.sliding_window"),
    }


def _uniform(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    """Architectures whose layers all have the same heads and rope."""
    n_heads = keys.integer("attention.head_count")
    head_dim = keys.maybe_integer("attention.key_length") or max(
        keys.integer("embedding_length") // n_heads, 1
    )
    if keys.maybe_integer("attention.value_length") not in (None, head_dim):
        raise UnsupportedModelError(
            f"{keys.section.where}: values of another size than keys are not supported"
        )
    rotary_dim = keys.maybe_integer("rope.dimension_count") or head_dim
    return _shared(keys, shapes) | {
        "num_key_value_heads": keys.maybe_integer("attention.head_count_kv") or n_heads,
        "head_dim": head_dim,
        "rope_theta": keys.maybe_number("rope.freq_base"),
        "rope_scaling": _rope_scaling(keys),
        "partial_rotary_factor": rotary_dim / head_dim,
    }


def _rope_scaling(keys: _Keys) -> dict[str, object] | None:
    kind = keys.section.string(keys.name("rope.scaling.type"), "none")
    if kind == "none":
        return None
    keys.refuse("rope.scaling.yarn_log_multiplier")
    keys.refuse("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", neutral=1.0)
    keys.refuse("rope.scaling.yarn_ext_factor", neutral=1.0)
    return {
        "rope_type": kind,
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.maybe_integer("rope.scaling.original_context_length"),
        "beta_fast": keys.maybe_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.maybe_number("rope.scaling.yarn_beta_slow"),
    }


def _llama(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    """Llama and Mistral, which differ in the window alone."""
    keys.refuse("expert_count")
    has_window = keys.maybe_integer("attention.sliding_window") is not None
    return _uniform(keys, shapes) | {
        "architectures": ["MistralForCausalLM" if has_window else "LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }


def _qwen2(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    return _uniform(keys, shapes) | {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    return _uniform(keys, shapes) | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }


def _qwen3moe(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    """Always renormalised, as its only runtime has it."""
    keys.refuse("expert_shared_count", "leading_dense_block_count")
    keys.refuse("expert_weights_scale", neutral=1.0)
    return _uniform(keys, shapes) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }


def _gemma4(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    """Head sizes, kv heads and rope differ between sliding and global layers; a list says which is which."""
    keys.refuse("expert_count")
    pattern = keys.section.values.get(keys.name("attention.sliding_window_pattern"))
    if not isinstance(pattern, list) or not pattern:
        raise keys.section.error(
            keys.name("attention.sliding_window_pattern"), "must list the sliding layers"
        )
    kv_heads = keys.section.integers(keys.name("attention.head_count_kv"), REQUIRED)
    if len(kv_heads) not in (1, len(pattern)):
        raise keys.section.error(keys.name("attention.head_count_kv"), f"must list {len(pattern)} layers")
    by_layer = kv_heads * len(pattern) if len(kv_heads) == 1 else kv_heads
    first_global = next((index for index, is_sliding in enumerate(pattern) if not is_sliding), 0)
    first_sliding = next((index for index, is_sliding in enumerate(pattern) if is_sliding), first_global)
    theta = {"sliding_attention": "rope.freq_base_swa", "full_attention": "rope.freq_base"}
    return _shared(keys, shapes) | {
        "architectures": ["Gemma4ForCausalLM"],
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in pattern],
        "head_dim": keys.integer("attention.key_length_swa"),
        "global_head_dim": keys.integer("attention.key_length"),
        "num_key_value_heads": by_layer[first_sliding],
        "num_global_key_value_heads": by_layer[first_global],
        "attention_k_eq_v": f"blk.{first_global}.attn_v.weight" not in shapes,
        "rope_parameters": {kind: {"rope_theta": keys.number(key)} for kind, key in theta.items()},
        "hidden_size_per_layer_input": keys.maybe_integer("embedding_length_per_layer_input") or 0,
        "num_kv_shared_layers": keys.maybe_integer("attention.shared_kv_layers") or 0,
        "final_logit_softcapping": keys.maybe_number("final_logit_softcapping"),
    }


_ARCHITECTURES: dict[str, Callable[[_Keys, Shapes], dict[str, object]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma4": _gemma4,
}


def _with_factors(section: Section, layer: LayerSpec, factors: tuple[float, ...]) -> LayerSpec:
    """The layer with its rope's divisors; sliding layers have none (Gemma means its global ones)."""
    mixer = layer.mixer
    if not factors or not isinstance(mixer, AttentionSpec) or mixer.rope is None or mixer.window is not None:
        return layer
    if len(factors) != mixer.rope.rotary_dim // 2 or not min(factors) > 0:
        raise section.error("rope_freqs.weight", f"must hold {mixer.rope.rotary_dim // 2} positive numbers")
    return replace(layer, mixer=replace(mixer, rope=replace(mixer.rope, frequency_factors=factors)))
