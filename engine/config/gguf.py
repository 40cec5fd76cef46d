"""GGUF metadata to a ModelConfig: rewritten as the configuration of the same family, then read as that.

So a family is described once. What GGUF tells by the presence of a tensor (biases, a head of its own)
comes in as the tensors' shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.config.generation import GenerationDefaults
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
    """Reads a GGUF file's metadata. Raises UnsupportedModelError, ConfigError."""
    section = Section(metadata, where)
    architecture = section.string("general.architecture", REQUIRED)
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where}: GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    settings = _ARCHITECTURES[architecture](_Keys(section, architecture), tensor_shapes)
    model = model_config_from_hf(settings)
    layers = tuple(_with_frequency_factors(section, layer, frequency_factors) for layer in model.layers)
    return replace(model, architecture=architecture, layers=layers, generation=_generation(section))


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
        return self.section.integer(self.name(key), None)

    def number(self, key: str) -> float:
        return self.section.number(self.name(key), REQUIRED)

    def maybe_number(self, key: str) -> float | None:
        return self.section.number(self.name(key), None)

    def refuse(self, *keys: str) -> None:
        """Raises UnsupportedModelError for a key whose meaning is not implemented."""
        for key in keys:
            value = self.section.values.get(self.name(key))
            if value not in (None, 0, False):
                raise UnsupportedModelError(
                    f"{self.section.where}: {self.name(key)} = {value!r} is not supported"
                )


def _common(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    """What all architectures state alike."""
    n_heads = keys.integer("attention.head_count")
    settings: dict[str, object] = {
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": keys.maybe_integer("attention.head_count_kv") or n_heads,
        "head_dim": keys.maybe_integer("attention.key_length"),
        "intermediate_size": keys.maybe_integer("feed_forward_length"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.maybe_number("rope.freq_base"),
        "rope_scaling": _rope_scaling(keys),
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "sliding_window": keys.maybe_integer("attention.sliding_window"),
    }
    head_dim = keys.maybe_integer("attention.key_length")
    if keys.maybe_integer("attention.value_length") not in (None, head_dim):
        raise UnsupportedModelError(
            f"{keys.section.where}: keys and values of different sizes are not supported"
        )
    rotary_dim = keys.maybe_integer("rope.dimension_count")
    full_dim = head_dim or keys.integer("embedding_length") // n_heads
    if rotary_dim is not None and rotary_dim != full_dim:
        settings["partial_rotary_factor"] = rotary_dim / full_dim
    keys.refuse(
        "attention.clamp_kqv", "attention.max_alibi_bias", "logit_scale", "residual_scale", "embedding_scale"
    )
    return settings


def _rope_scaling(keys: _Keys) -> dict[str, object] | None:
    kind = keys.section.string(keys.name("rope.scaling.type"), "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.maybe_integer("rope.scaling.original_context_length"),
        "attention_factor": keys.maybe_number("rope.scaling.attn_factor"),
    }


def _llama(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    keys.refuse("expert_count")
    has_window = keys.maybe_integer("attention.sliding_window") is not None
    name = "MistralForCausalLM" if has_window else "LlamaForCausalLM"
    return _common(keys, shapes) | {
        "architectures": [name],
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }


def _qwen2(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    return _common(keys, shapes) | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": None}


def _qwen3(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    return _common(keys, shapes) | {"architectures": ["Qwen3ForCausalLM"], "sliding_window": None}


def _qwen3moe(keys: _Keys, shapes: Shapes) -> dict[str, object]:
    keys.refuse("expert_shared_count", "leading_dense_block_count")
    return _common(keys, shapes) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "sliding_window": None,
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


_ARCHITECTURES: dict[str, Callable[[_Keys, Shapes], dict[str, object]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
}


def _with_frequency_factors(section: Section, layer: LayerSpec, factors: tuple[float, ...]) -> LayerSpec:
    mixer = layer.mixer
    if not factors or not isinstance(mixer, AttentionSpec) or mixer.rope is None:
        return layer
    if len(factors) != mixer.rope.rotary_dim // 2 or min(factors) <= 0:
        raise section.error("rope_freqs.weight", f"must hold {mixer.rope.rotary_dim // 2} positive numbers")
    return replace(layer, mixer=replace(mixer, rope=replace(mixer.rope, frequency_factors=factors)))


def _generation(section: Section) -> GenerationDefaults:
    """GGUF has token ids only; end of turn and end of message end an answer too."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [section.integer(f"tokenizer.ggml.{key}", None, minimum=0) for key in keys]
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(token for token in ids if token is not None)),
        bos_token_id=section.integer("tokenizer.ggml.bos_token_id", None, minimum=0),
        pad_token_id=section.integer("tokenizer.ggml.padding_token_id", None, minimum=0),
    )
