"""Small Hugging Face configurations to vary in tests."""

from __future__ import annotations

from typing import Any


def hf_config(architecture: str, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    } | settings


def moe_config(**settings: Any) -> dict[str, Any]:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return hf_config("Qwen3MoeForCausalLM", **(experts | settings))


def gemma4_config(**settings: Any) -> dict[str, Any]:
    config = hf_config(
        "Gemma4ForCausalLM",
        num_hidden_layers=7,
        hidden_size=5376,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        sliding_window=1024,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
    )
    return config | settings
