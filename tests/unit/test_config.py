"""Hugging Face configurations to layer specs: real models' facts, defaults, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import (
    Activation,
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ModelConfig,
    MoESpec,
    NormSpec,
    RopeKind,
    WeightFormat,
    expected_tensors,
)
from engine.errors import ConfigError, UnsupportedModelError
from tests.unit.config_tools import gemma4_config, hf_config, moe_config


def _attention(config: ModelConfig, layer: int = 0) -> AttentionSpec:
    mixer = config.layers[layer].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


# ---- defaults and quirks


def test_defaults_of_a_bare_llama() -> None:
    config = ModelConfig.from_hf(hf_config("LlamaForCausalLM"))
    attention = _attention(config)
    assert (attention.n_heads, attention.n_kv_heads, attention.head_dim) == (4, 4, 16)
    assert attention.scale == 0.25
    assert attention.rope is not None
    assert (attention.rope.theta, attention.rope.rotary_dim) == (1e4, 16)
    assert (attention.qkv_bias, attention.output_bias, attention.output_gate) == (False, False, False)
    assert attention.qk_norm is None
    assert config.layers[0].norm == NormSpec(1e-6)
    assert config.layers[0].feed_forward == DenseSpec(128, Activation.SILU, bias=False)
    assert config.tied_embeddings is False
    assert config.weight_format == WeightFormat()
    assert len(set(config.layers)) == 1


def test_null_counts_as_absent() -> None:
    config = ModelConfig.from_hf(
        hf_config("LlamaForCausalLM", head_dim=None, num_key_value_heads=None, rope_scaling=None)
    )
    assert _attention(config).head_dim == 16


def test_heads_need_not_fill_the_hidden_size() -> None:
    text = hf_config(
        "",
        model_type="mistral",
        hidden_size=5120,
        num_attention_heads=32,
        head_dim=128,
        num_key_value_heads=8,
    )
    del text["architectures"]
    config = ModelConfig.from_hf(
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    )
    attention = _attention(config)
    assert (attention.q_dim, config.hidden_size) == (4096, 5120)
    shapes = expected_tensors(config)
    assert shapes["layers.0.attention.o.weight"] == (5120, 4096)
    assert shapes["layers.3.attention.k.weight"] == (1024, 5120)


def test_mistral_window_is_4096_only_where_nothing_is_said() -> None:
    assert _attention(ModelConfig.from_hf(hf_config("MistralForCausalLM"))).window == 4096
    assert (
        _attention(ModelConfig.from_hf(hf_config("MistralForCausalLM", sliding_window=None))).window is None
    )
    assert _attention(ModelConfig.from_hf(hf_config("MistralForCausalLM", sliding_window=7))).window == 7


def test_qwen2_window_counts_from_a_layer_on_and_only_if_used() -> None:
    unused = ModelConfig.from_hf(hf_config("Qwen2ForCausalLM", sliding_window=32, max_window_layers=2))
    assert [_attention(unused, i).window for i in range(4)] == [None] * 4
    used = hf_config("Qwen2ForCausalLM", sliding_window=32, max_window_layers=2, use_sliding_window=True)
    assert [_attention(ModelConfig.from_hf(used), i).window for i in range(4)] == [None, None, 32, 32]
    typed = used | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    assert [_attention(ModelConfig.from_hf(typed), i).window for i in range(4)] == [32, None, 32, None]


def test_biases_and_norms_by_family() -> None:
    qwen2 = _attention(ModelConfig.from_hf(hf_config("Qwen2ForCausalLM")))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, None)
    qwen3 = _attention(ModelConfig.from_hf(hf_config("Qwen3ForCausalLM", rms_norm_eps=1e-5)))
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, NormSpec(1e-5))
    llama = _attention(ModelConfig.from_hf(hf_config("LlamaForCausalLM", attention_bias=True)))
    assert (llama.qkv_bias, llama.output_bias) == (True, True)


def test_smollm3_leaves_rope_out_of_every_fourth_layer() -> None:
    config = ModelConfig.from_hf(hf_config("SmolLM3ForCausalLM", num_hidden_layers=8))
    assert [_attention(config, i).rope is None for i in range(8)] == [False, False, False, True] * 2
    assert config.tied_embeddings


def test_old_flat_qwen_vl() -> None:
    config = ModelConfig.from_hf(
        hf_config(
            "Qwen2_5_VLForConditionalGeneration",
            model_type="qwen2_5_vl",
            vision_config={"depth": 32},
            rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        )
    )
    rope = _attention(config).rope
    assert rope is not None
    assert (rope.kind, rope.theta) == (RopeKind.DEFAULT, 1e6)


def _ministral(**rope: Any) -> dict[str, Any]:
    yarn = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    return hf_config(
        "Ministral3ForCausalLM",
        model_type="ministral3",
        max_position_embeddings=262144,
        rope_parameters=yarn | {"llama_4_scaling_beta": 0.1} | rope,
    )


def test_ministral_ends_where_its_queries_would_grow() -> None:
    config = ModelConfig.from_hf(_ministral())
    assert config.max_sequence_length == 16384
    assert _attention(config).window is None
    with pytest.raises(ConfigError, match="must be of type yarn"):
        ModelConfig.from_hf(_ministral(type="default"))


def test_growing_queries_are_refused_elsewhere() -> None:
    config = _ministral() | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    with pytest.raises(UnsupportedModelError, match="llama_4_scaling_beta"):
        ModelConfig.from_hf(config)


# ---- mixtures


def test_moe_layers_by_step_and_exceptions() -> None:
    config = ModelConfig.from_hf(moe_config(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    kinds = [layer.feed_forward.kind for layer in config.layers]
    assert kinds == ["dense", "moe", "dense", "dense", "dense", "moe"]


def test_moe_renormalises_by_default() -> None:
    layer = ModelConfig.from_hf(moe_config()).layers[0].feed_forward
    assert layer == MoESpec(8, 2, 32, normalise_top_k=True)
    layer = ModelConfig.from_hf(moe_config(norm_topk_prob=False)).layers[0].feed_forward
    assert isinstance(layer, MoESpec)
    assert not layer.normalise_top_k


def test_pure_moe_needs_no_intermediate_size() -> None:
    config = moe_config()
    del config["intermediate_size"]
    assert expected_tensors(ModelConfig.from_hf(config))["layers.3.moe.experts.7.down.weight"] == (64, 32)


def test_both_spellings_of_the_number_of_experts() -> None:
    renamed = moe_config(num_local_experts=8)
    del renamed["num_experts"]
    assert ModelConfig.from_hf(renamed) == ModelConfig.from_hf(moe_config())
    del renamed["num_local_experts"]
    with pytest.raises(ConfigError, match="num_experts is missing"):
        ModelConfig.from_hf(renamed)


def test_hybrid_layers() -> None:
    text = hf_config(
        "",
        model_type="qwen3_5_moe_text",
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]},
    )
    config = ModelConfig.from_hf(
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "text_config": text,
            "tie_word_embeddings": True,
        }
    )
    assert [layer.mixer.kind for layer in config.layers] == ["deltanet"] * 3 + ["attention"]
    deltanet, attention = config.layers[0].mixer, _attention(config, 3)
    assert isinstance(deltanet, DeltaNetSpec)
    assert (deltanet.conv_dim, deltanet.value_dim, deltanet.conv_kernel) == (2 * 32 + 48, 48, 4)
    assert attention.output_gate
    assert attention.rope is not None
    assert (attention.rope.rotary_dim, attention.rope.theta) == (8, 1e7)
    assert attention.qk_norm == config.final_norm == NormSpec(1e-6, weight_offset=1.0)
    assert config.layers[1].feed_forward == MoESpec(4, 2, 32, normalise_top_k=True, shared_intermediate=48)
    assert config.tied_embeddings
    assert config.has_recurrent_state
    assert config.attention_layers == (3,)
    assert config.kv_elements_per_token() == 2 * 4 * 32
    assert config.state_elements_per_sequence() == 3 * (6 * 16 * 8 + 3 * 112)
    assert expected_tensors(config)["layers.3.attention.q.weight"] == (2 * 4 * 32, 64)


# ---- Gemma 4


def test_gemma4_dense() -> None:
    config = ModelConfig.from_hf(gemma4_config())
    sliding, last = _attention(config, 0), _attention(config, 5)
    assert [_attention(config, i).window for i in range(7)] == [1024] * 5 + [None, None]
    assert (sliding.head_dim, sliding.n_kv_heads, last.head_dim, last.n_kv_heads) == (256, 16, 512, 4)
    assert (sliding.scale, last.scale) == (1.0, 1.0)
    assert (sliding.v_from_k, last.v_from_k) == (False, True)
    assert sliding.rope is not None
    assert last.rope is not None
    assert (sliding.rope.kind, sliding.rope.theta) == (RopeKind.DEFAULT, 1e4)
    assert (last.rope.kind, last.rope.theta, last.rope.rotated_angles) == (RopeKind.PROPORTIONAL, 1e6, 64)
    assert last.v_norm_eps == 1e-6
    assert config.embedding_scale == 73.5
    assert config.logit_softcap == 30.0
    assert config.tied_embeddings
    assert config.final_norm.weight_offset == 0.0
    layer = config.layers[0]
    assert layer.post_norms
    assert layer.has_scalar
    assert layer.feed_forward == DenseSpec(128, Activation.GELU_TANH)
    assert "layers.5.attention.v.weight" not in expected_tensors(config)
    assert "layers.4.attention.v.weight" in expected_tensors(config)


@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ({"hidden_size_per_layer_input": 256}, "per-layer embeddings"),
        ({"num_kv_shared_layers": 2}, "share keys and values"),
        ({"enable_moe_block": True}, "mixture of experts"),
        ({"use_bidirectional_attention": "all"}, "bidirectional"),
    ],
)
def test_gemma4_variants_are_refused_by_feature(settings: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedModelError, match=feature):
        ModelConfig.from_hf(gemma4_config(**settings))


def test_gemma4_sizes_layer_by_layer() -> None:
    config = gemma4_config(
        per_layer_config={"5": {"head_dim": 512, "num_key_value_heads": 4}, "6": {"head_dim": 128}}
    )
    for key in ("global_head_dim", "num_global_key_value_heads"):
        del config[key]
    mixers = [_attention(ModelConfig.from_hf(config), index) for index in range(7)]
    assert [(mixer.head_dim, mixer.n_kv_heads) for mixer in mixers[4:]] == [(256, 16), (512, 4), (128, 16)]
    for overrides, problem in (
        ({"0": {"sliding_window": 3}}, "sliding_window"),
        ({"7": {}}, "7 is no layer"),
    ):
        with pytest.raises(ConfigError, match=problem):
            ModelConfig.from_hf(gemma4_config(per_layer_config=overrides))


def test_gemma4_that_does_not_deny_per_layer_embeddings_has_them() -> None:
    config = gemma4_config()
    del config["hidden_size_per_layer_input"]
    with pytest.raises(UnsupportedModelError, match="per-layer embeddings"):
        ModelConfig.from_hf(config)
