"""What is refused, by name, and what is malformed, by key; quantised weights."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import ModelConfig, WeightFormat, WeightScheme
from engine.errors import ConfigError, UnsupportedModelError
from tests.unit.config_tools import hf_config, moe_config

# ---- refusals


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma3ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Qwen3NextForCausalLM",
        "MixtralForCausalLM",
        "LlamaForRanking",
    ],
)
def test_other_architectures_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_hf(hf_config(architecture))
    message = str(caught.value)
    assert repr(architecture) in message
    assert "Qwen3MoeForCausalLM" in message
    assert "LlamaForCausalLM" in message


def test_a_known_wrapper_around_an_unknown_text_model_is_refused() -> None:
    text = hf_config("", model_type="mistral4")
    with pytest.raises(UnsupportedModelError, match="around a 'mistral4' text model"):
        ModelConfig.from_hf({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_qkv": 8.0},
        {"residual_multiplier": 0.22},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"alibi": True},
        {"num_local_experts": 8},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"per_layer_config": {"1": {"head_dim": 32}}},
        {"rope_interleaved": True},
        {"is_causal": False},
    ],
)
def test_mathematics_of_other_models_is_refused(settings: dict[str, Any]) -> None:
    key = next(iter(settings))
    with pytest.raises(UnsupportedModelError, match=key):
        ModelConfig.from_hf(hf_config("LlamaForCausalLM", **settings))


def test_harmless_unknown_keys_are_ignored() -> None:
    config = hf_config(
        "LlamaForCausalLM", transformers_version="4.9", pretraining_tp=1, use_cache=True, alibi=False
    )
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(hf_config("LlamaForCausalLM"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": -64}, "hidden_size must lie between"),
        ({"hidden_size": 10**30}, "hidden_size must lie between"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must lie between"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must lie between"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"quantization_config": 4}, "quantization_config must be an object"),
    ],
)
def test_malformed_keys_are_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ModelConfig.from_hf(hf_config("LlamaForCausalLM", **settings))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_experts": 10**7}, "num_experts must lie between"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must lie between"),
        ({"layer_types": ["full_attention"]}, None),
    ],
)
def test_malformed_mixtures(settings: dict[str, Any], problem: str | None) -> None:
    if problem is None:
        assert ModelConfig.from_hf(moe_config(**settings)).n_layers == 4
        return
    with pytest.raises(ConfigError, match=problem):
        ModelConfig.from_hf(moe_config(**settings))


# ---- quantised weights


def _compressed(**weights: Any) -> dict[str, Any]:
    described = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": described, "targets": ["Linear"]}},
    }


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, WeightFormat(WeightScheme.FP8_TENSOR)),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            WeightFormat(WeightScheme.FP8_BLOCK, (128, 128)),
        ),
        (_compressed(), WeightFormat(WeightScheme.FP8_ROW)),
        (_compressed(strategy="tensor"), WeightFormat(WeightScheme.FP8_TENSOR)),
        (
            _compressed(strategy="block", block_structure=[64, 128]),
            WeightFormat(WeightScheme.FP8_BLOCK, (64, 128)),
        ),
    ],
)
def test_fp8_formats(quantization: dict[str, Any], expected: WeightFormat) -> None:
    config = ModelConfig.from_hf(hf_config("Qwen3ForCausalLM", quantization_config=quantization))
    assert config.weight_format == expected


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        (_compressed(num_bits=4, type="int"), "'int' and 4 bits"),
        (_compressed(strategy="group"), "'group'"),
        (_compressed() | {"format": "pack-quantized"}, "'pack-quantized'"),
    ],
)
def test_other_quantizations_are_refused_by_name(quantization: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        ModelConfig.from_hf(hf_config("LlamaForCausalLM", quantization_config=quantization))
    assert "supported are fp8" in str(caught.value)


def test_mlx_quantization_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="MLX quantization is not supported"):
        ModelConfig.from_hf(hf_config("LlamaForCausalLM", quantization={"group_size": 64, "bits": 4}))
