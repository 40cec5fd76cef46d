"""Which models the CUDA engine can run: everything else is refused by name, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig
from engine.errors import UnsupportedModelError
from kernels.attention_decode import MAX_GROUP
from kernels.rope import HEAD_DIMS
from kernels.sampling import MAX_VOCAB

_VECTOR = 8
"""Elements that kernels load at once: every row is a multiple of it."""


def require_supported(config: ModelConfig) -> None:
    """Raises UnsupportedModelError that names each feature without a kernel, and where it stands."""
    found: dict[str, str] = {}
    for feature in _model_features(config):
        found.setdefault(feature, "")
    for index, layer in enumerate(config.layers):
        for feature in _layer_features(layer):
            found.setdefault(feature, f" (layer {index})")
    if found:
        missing = "; ".join(feature + where for feature, where in found.items())
        raise UnsupportedModelError(
            f"The CUDA engine cannot run {config.architecture} yet: {missing}. It runs dense models with "
            "full or sliding attention (Llama, Mistral, Qwen2, Qwen3, SmolLM); the reference engine may "
            "run this one."
        )


def _model_features(config: ModelConfig) -> Iterator[str]:
    if config.logit_softcap is not None:
        yield "softcapped logits"
    if config.vocab_size % _VECTOR or config.vocab_size > MAX_VOCAB:
        yield f"a vocabulary of {config.vocab_size} (must be a multiple of {_VECTOR}, at most {MAX_VOCAB})"
    if config.hidden_size % _VECTOR:
        yield f"hidden size {config.hidden_size} (must be a multiple of {_VECTOR})"


def _layer_features(layer: LayerSpec) -> Iterator[str]:
    if layer.post_norms:
        yield "norms after mixer and feed-forward"
    if layer.has_scalar:
        yield "a scalar on the residual stream"
    if isinstance(layer.mixer, AttentionSpec):
        yield from _attention_features(layer.mixer)
    else:
        yield f"{layer.mixer.kind} mixers"
    if not isinstance(layer.feed_forward, DenseSpec):
        yield f"{layer.feed_forward.kind} feed-forwards"
    elif layer.feed_forward.intermediate % _VECTOR:
        yield f"intermediate size {layer.feed_forward.intermediate} (must be a multiple of {_VECTOR})"


def _attention_features(mixer: AttentionSpec) -> Iterator[str]:
    has_kernel = mixer.head_dim in HEAD_DIMS
    if not has_kernel:
        yield f"head_dim {mixer.head_dim} (there is {', '.join(map(str, HEAD_DIMS))})"
    if mixer.n_heads // mixer.n_kv_heads > MAX_GROUP:
        yield f"{mixer.n_heads // mixer.n_kv_heads} query heads per kv head (at most {MAX_GROUP})"
    if mixer.v_norm_eps is not None:
        yield "a norm on v"
    if mixer.v_from_k:
        yield "v taken from k"
    if mixer.output_gate:
        yield "gated attention"
    if has_kernel and mixer.rope is not None and mixer.rope.rotary_dim // 2 % (mixer.head_dim // 32):
        yield f"a rotation of {mixer.rope.rotary_dim} of {mixer.head_dim} dimensions"
