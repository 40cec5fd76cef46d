"""Tiny models of every family, as configurations and a seed: what the golden logits were made from.

Shapes are awkward on purpose: odd layer counts, GQA ratios 1, 2, 3, 7 and 8, head_dim 32 to 256, heads
that do not fill the hidden size, windows around the page size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

VOCAB = 96
PROMPT_LENGTHS = (1, 2, 63, 64, 65, 200)


@dataclass(frozen=True)
class Case:
    """One model."""

    family: str
    """Names the golden file."""
    name: str
    config: dict[str, Any]
    """All of config.json."""
    seed: int
    prefix: str = "model."
    head_name: str = "lm_head.weight"
    fuse_experts: bool = False
    shards: int = 1

    @property
    def id(self) -> str:
        return f"{self.family}-{self.name}"


def _text(
    model_type: str,
    *,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = 32,
    **more: Any,
) -> dict[str, Any]:
    """A text model's configuration; `more` adds or overrides keys."""
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 80,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if head_dim is None:
        del config["head_dim"]
    return config | more


def _causal(architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    return {"architectures": [architecture]} | _text(model_type, **settings)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_YARN_FULL = _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}


def _llama() -> Iterator[tuple[str, dict[str, Any]]]:
    def llama(**settings: Any) -> dict[str, Any]:
        return _causal("LlamaForCausalLM", "llama", **settings)

    yield "mha", llama(layers=1, heads=3, kv_heads=3, head_dim=None, hidden=96)
    yield "gqa7", llama(heads=7, kv_heads=1, hidden=112, tie_word_embeddings=True)
    yield (
        "gqa3-like-smollm2",
        llama(hidden=144, heads=9, kv_heads=3, head_dim=64, rope_theta=1e5, tie_word_embeddings=True),
    )
    yield "biases", llama(attention_bias=True, mlp_bias=True, layers=2)
    yield "llama3-rope", llama(rope_scaling=_LLAMA3_ROPE, rope_theta=500000.0, head_dim=64)
    yield "linear-rope", llama(rope_scaling={"type": "linear", "factor": 2.5}, heads=8, kv_heads=1)
    yield "new-rope-spelling", llama(rope_parameters=_LLAMA3_ROPE | {"rope_theta": 2e5}, head_dim=128)
    yield "head-256", llama(heads=2, kv_heads=1, head_dim=256, layers=1, rms_norm_eps=1e-6)


def _mistral() -> Iterator[tuple[str, dict[str, Any]]]:
    def mistral(**settings: Any) -> dict[str, Any]:
        return _causal("MistralForCausalLM", "mistral", **settings)

    yield "no-window", mistral(sliding_window=None, head_dim=None, heads=2)
    for window in (1, 16, 64, 65, 199, 200, 201):
        yield f"window-{window}", mistral(sliding_window=window, heads=6, kv_heads=2, layers=2, hidden=96)
    yield "yarn", mistral(sliding_window=None, rope_parameters=_YARN_FULL | {"rope_theta": 1e6})
    yield (
        "gqa8",
        mistral(sliding_window=64, heads=8, kv_heads=1, head_dim=128, layers=1, tie_word_embeddings=True),
    )


def _smollm3() -> Iterator[tuple[str, dict[str, Any]]]:
    def smollm3(**settings: Any) -> dict[str, Any]:
        return _causal("SmolLM3ForCausalLM", "smollm3", head_dim=None, **settings)

    yield "interval", smollm3(layers=5, heads=2, kv_heads=1, no_rope_layer_interval=2)
    yield "listed", smollm3(no_rope_layers=[0, 1, 1], tie_word_embeddings=True, attention_bias=True)
    yield "window", smollm3(layers=4, use_sliding_window=True, sliding_window=30, mlp_bias=True)
    yield "gqa3", smollm3(layers=5, hidden=192, heads=3, kv_heads=1)


def _qwen2() -> Iterator[tuple[str, dict[str, Any]]]:
    def qwen2(**settings: Any) -> dict[str, Any]:
        return _causal("Qwen2ForCausalLM", "qwen2", **settings)

    yield "gqa7", qwen2(heads=14, kv_heads=2, head_dim=None, hidden=448, layers=1, tie_word_embeddings=True)
    yield "window", qwen2(use_sliding_window=True, sliding_window=50, max_window_layers=1, head_dim=None)
    yield "yarn", qwen2(rope_scaling=_YARN, rope_theta=1e6, head_dim=None, heads=1, kv_heads=1)
    yield "gqa3", qwen2(hidden=384, heads=3, kv_heads=1, head_dim=None, layers=1)


def _qwen2_5_vl() -> Iterator[tuple[str, dict[str, Any]]]:
    def text(section: list[int], **settings: Any) -> dict[str, Any]:
        rope = {"type": "mrope", "rope_type": "default", "mrope_section": section}
        layers = settings.get("layers", 3)
        types = ["full_attention"] * layers
        return _text("qwen2_5_vl_text", head_dim=None, rope_scaling=rope, layer_types=types, **settings)

    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    }
    top = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    plain = text([2, 3, 3])
    yield "nested", top | {"text_config": plain, "vision_config": vision, "tie_word_embeddings": False}
    gqa7 = text([4, 6, 6], hidden=224, heads=7, kv_heads=1, layers=1)
    yield "gqa7-tied", top | {"text_config": gqa7, "vision_config": vision, "tie_word_embeddings": True}


def _qwen3() -> Iterator[tuple[str, dict[str, Any]]]:
    def qwen3(**settings: Any) -> dict[str, Any]:
        return _causal("Qwen3ForCausalLM", "qwen3", **settings)

    yield "gqa2", qwen3(head_dim=128, rope_theta=1e6, tie_word_embeddings=True)
    yield "gqa8", qwen3(heads=8, kv_heads=1, head_dim=64, layers=1)
    yield "biases", qwen3(attention_bias=True, heads=3, kv_heads=3, hidden=96)
    yield "yarn", qwen3(rope_scaling=_YARN | {"attention_factor": 1.3}, heads=2, kv_heads=2)
    yield "window", qwen3(use_sliding_window=True, sliding_window=64, max_window_layers=2)
    yield "gqa7-head-256", qwen3(heads=7, kv_heads=1, head_dim=256, layers=1)
    yield "gqa3", qwen3(heads=6, kv_heads=2, layers=5)


def _qwen3_moe() -> Iterator[tuple[str, dict[str, Any]]]:
    def moe(**settings: Any) -> dict[str, Any]:
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
        return _causal("Qwen3MoeForCausalLM", "qwen3_moe", **(experts | settings))

    yield "renormalised", moe()
    yield "raw-probabilities", moe(norm_topk_prob=False, tie_word_embeddings=True)
    yield "sparse-step", moe(layers=5, decoder_sparse_step=2, num_experts_per_tok=1)
    yield "dense-only", moe(layers=4, mlp_only_layers=[0, 2], num_experts=5, num_experts_per_tok=5)
    yield "biases-window", moe(attention_bias=True, use_sliding_window=True, sliding_window=33, layers=2)
    yield "gqa8", moe(heads=8, kv_heads=1, head_dim=128, layers=1, num_experts_per_tok=8)
    yield "gqa3", moe(heads=3, kv_heads=1, head_dim=64, tie_word_embeddings=True)


_GEMMA_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}


def _gemma4() -> Iterator[tuple[str, dict[str, Any]]]:
    def text(**settings: Any) -> dict[str, Any]:
        config = _text(
            "gemma4_text",
            **{
                "layers": 6,
                "global_head_dim": 128,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "sliding_window": 40,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "hidden_activation": "gelu_pytorch_tanh",
                "final_logit_softcapping": 30.0,
                "tie_word_embeddings": True,
                "pad_token_id": 0,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": {
                        "rope_type": "proportional",
                        "partial_rotary_factor": 0.25,
                        "rope_theta": 1000000.0,
                    },
                },
            }
            | settings,
        )
        for key in ("rope_theta", "hidden_act"):
            del config[key]
        return config

    causal = {"architectures": ["Gemma4ForCausalLM"]}
    yield "k-is-v", causal | text()
    yield "own-v", causal | text(attention_k_eq_v=False, layers=3, global_head_dim=64, hidden=72)
    yield (
        "types",
        causal
        | text(
            layers=3,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            heads=8,
            kv_heads=8,
        ),
    )
    yield (
        "no-softcap",
        causal | text(layers=2, final_logit_softcapping=None, sliding_window=64, rope_parameters=None),
    )
    yield "wide", causal | text(layers=2, head_dim=256, global_head_dim=512, heads=2, kv_heads=2, hidden=168)
    by_layer = text(layers=3, per_layer_config={"2": {"head_dim": 64, "num_key_value_heads": 4}})
    del by_layer["global_head_dim"], by_layer["num_global_key_value_heads"]
    yield "by-layer", causal | by_layer
    top = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    yield (
        "wrapper",
        top
        | {
            "text_config": text(layers=2),
            "vision_config": _GEMMA_VISION,
            "audio_config": None,
            "tie_word_embeddings": True,
        },
    )


def _hybrid_text(model_type: str, **settings: Any) -> dict[str, Any]:
    config = _text(
        model_type,
        **{
            "layers": 4,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
            "rms_norm_eps": 1e-6,
        }
        | settings,
    )
    del config["rope_theta"]
    return config


_QWEN3_5_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _qwen3_5() -> Iterator[tuple[str, dict[str, Any]]]:
    causal = {"architectures": ["Qwen3_5ForCausalLM"]}
    yield "dense", causal | _hybrid_text("qwen3_5_text")
    yield (
        "one-key-head",
        causal
        | _hybrid_text(
            "qwen3_5_text",
            layers=3,
            linear_num_key_heads=1,
            linear_num_value_heads=3,
            full_attention_interval=2,
        ),
    )
    yield (
        "only-deltanet",
        causal
        | _hybrid_text(
            "qwen3_5_text",
            layers=1,
            linear_num_value_heads=2,
            tie_word_embeddings=True,
            linear_conv_kernel_dim=3,
        ),
    )
    yield (
        "gqa8",
        causal
        | _hybrid_text(
            "qwen3_5_text",
            layers=2,
            layer_types=["full_attention", "linear_attention"],
            heads=8,
            kv_heads=1,
            head_dim=128,
        ),
    )
    yield (
        "gqa7-head-256",
        causal
        | _hybrid_text(
            "qwen3_5_text",
            layers=3,
            full_attention_interval=3,
            heads=7,
            kv_heads=1,
            head_dim=256,
        ),
    )
    top = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    yield (
        "wrapper",
        top
        | {
            "text_config": _hybrid_text("qwen3_5_text"),
            "vision_config": _QWEN3_5_VISION | {"model_type": "qwen3_5_vision"},
            "tie_word_embeddings": False,
        },
    )


def _qwen3_5_moe() -> Iterator[tuple[str, dict[str, Any]]]:
    def text(**settings: Any) -> dict[str, Any]:
        experts = {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        }
        config = _hybrid_text("qwen3_5_moe_text", **(experts | settings))
        del config["intermediate_size"]
        return config

    causal = {"architectures": ["Qwen3_5MoeForCausalLM"]}
    yield "split", causal | text()
    yield "fused", causal | text(layers=3, num_experts_per_tok=4, full_attention_interval=3)
    yield "gqa3-tied", causal | text(layers=3, heads=3, kv_heads=1, tie_word_embeddings=True)
    top = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    yield (
        "wrapper-fused",
        top
        | {
            "text_config": text(layers=5),
            "vision_config": _QWEN3_5_VISION | {"model_type": "qwen3_5_moe_vision"},
            "tie_word_embeddings": False,
        },
    )


def _mistral3() -> Iterator[tuple[str, dict[str, Any]]]:
    text = _text("mistral", heads=4, kv_heads=1, head_dim=32, hidden=160, sliding_window=None, rope_theta=1e9)
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 32,
        "patch_size": 16,
    }
    top = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "vision_config": vision,
        "tie_word_embeddings": False,
    }
    yield "wrapper", top | {"text_config": text}
    yarn = _YARN_FULL | {
        "rope_theta": 1e6,
        "original_max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.1,
    }
    ministral = _text("ministral3", heads=6, kv_heads=2, hidden=96, sliding_window=None, rope_parameters=yarn)
    yield "ministral", top | {"text_config": ministral}
    gqa7 = _text("mistral", heads=7, kv_heads=1, head_dim=64, hidden=96, sliding_window=None, layers=1)
    yield "gqa7-tied", top | {"text_config": gqa7, "tie_word_embeddings": True}


_PLACES = {
    "mistral3-wrapper": {"prefix": "language_model.model.", "head_name": "language_model.lm_head.weight"},
    "mistral3-gqa7-tied": {"prefix": "model.language_model."},
    "mistral3-ministral": {"prefix": "language_model.model.", "head_name": "language_model.lm_head.weight"},
    "qwen2_5_vl-nested": {"prefix": "model.language_model."},
    "qwen2_5_vl-gqa7-tied": {"prefix": "model.language_model."},
    "gemma4-wrapper": {"prefix": "model.language_model."},
    "qwen3_5-wrapper": {"prefix": "model.language_model."},
    "qwen3_5_moe-wrapper-fused": {"prefix": "model.language_model.", "fuse_experts": True, "shards": 3},
    "qwen3_5_moe-fused": {"fuse_experts": True},
    "qwen3-gqa2": {"shards": 2},
}
"""Where checkpoints put their tensors, other than under "model."."""

_FAMILIES = {
    "llama": _llama,
    "mistral": _mistral,
    "mistral3": _mistral3,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma4": _gemma4,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
}


def _all_cases() -> Iterator[Case]:
    for family, make in _FAMILIES.items():
        for number, (name, config) in enumerate(make()):
            places: dict[str, Any] = _PLACES.get(f"{family}-{name}", {})
            yield Case(family, name, config, seed=1000 + number, **places)


CASES = tuple(_all_cases())


@dataclass(frozen=True)
class RopeCase:
    """Rope settings of a real model."""

    head_dim: int
    parameters: dict[str, Any]


ROPES = {
    "llama-3.1": RopeCase(
        128,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen3-yarn": RopeCase(
        128,
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "yarn-untruncated": RopeCase(
        64,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    ),
    "linear": RopeCase(96, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}),
    "gemma-4-global": RopeCase(
        512, {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}
    ),
}
