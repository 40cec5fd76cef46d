"""Real models' configurations against their published parameter counts: every shape must be right."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from engine.config import ModelConfig, expected_tensors


def _config(
    architecture: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    *,
    tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    } | more


_SMALL_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
_LARGE_EXPERTS = _SMALL_EXPERTS | {"moe_intermediate_size": 1536}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M": (
        _config("LlamaForCausalLM", 30, 576, 1536, 9, 3, 49152, tied=True),
        134_515_008,
    ),
    "SmolLM3-3B": (
        _config("SmolLM3ForCausalLM", 36, 2048, 11008, 16, 4, 128256, tied=True),
        3_075_098_624,
    ),
    "Llama-2-7b": (_config("LlamaForCausalLM", 32, 4096, 11008, 32, 32, 32000), 6_738_415_616),
    "Llama-3.1-8B": (_config("LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128256), 8_030_261_248),
    "Llama-3.2-1B": (
        _config("LlamaForCausalLM", 16, 2048, 8192, 32, 8, 128256, tied=True),
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (_config("MistralForCausalLM", 32, 4096, 14336, 32, 8, 32000), 7_241_732_096),
    "Mistral-Small-24B": (
        _config("MistralForCausalLM", 40, 5120, 32768, 32, 8, 131072, head_dim=128, sliding_window=None),
        23_572_403_200,
    ),
    "Qwen2.5-0.5B": (_config("Qwen2ForCausalLM", 24, 896, 4864, 14, 2, 151936, tied=True), 494_032_768),
    "Qwen2.5-7B": (_config("Qwen2ForCausalLM", 28, 3584, 18944, 28, 4, 152064), 7_615_616_512),
    "Qwen3-0.6B": (
        _config("Qwen3ForCausalLM", 28, 1024, 3072, 16, 8, 151936, tied=True, head_dim=128),
        596_049_920,
    ),
    "Qwen3-1.7B": (
        _config("Qwen3ForCausalLM", 28, 2048, 6144, 16, 8, 151936, tied=True, head_dim=128),
        1_720_574_976,
    ),
    "Qwen3-8B": (
        _config("Qwen3ForCausalLM", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        _config("Qwen3MoeForCausalLM", 48, 2048, 6144, 32, 4, 151936, **_SMALL_EXPERTS),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        _config("Qwen3MoeForCausalLM", 94, 4096, 12288, 64, 4, 151936, **_LARGE_EXPERTS),
        235_093_634_560,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_add_up_to_the_published_count(name: str) -> None:
    config, published = PUBLISHED[name]
    shapes = expected_tensors(ModelConfig.from_hf(config))
    assert sum(prod(shape) for shape in shapes.values()) == published
