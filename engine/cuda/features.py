"""What the CUDA engine can run, and in which precision; all else is refused by name, before any loading."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, expected_tensors
from engine.cuda.gemm_key import FP8_MULTIPLE, fits_fp8
from engine.errors import UnsupportedModelError
from engine.options import KvDtype, Precision
from kernels.attention_decode import MAX_GROUP
from kernels.fp8 import MAX_COLUMNS as MAX_FP8_COLUMNS
from kernels.fp8 import MIN_COMPUTE_CAPABILITY as FP8_CAPABILITY
from kernels.q4 import BLOCK, TILE_ROWS
from kernels.rope import HEAD_DIMS
from kernels.sampling import MAX_VOCAB

_VECTOR = 8
"""Elements that kernels load at once: every row is a multiple of it."""

_FP8_BIASES = (".q.bias", ".k.bias", ".v.bias")
"""That rope adds behind the scales; the others' raw sums go where nobody adds a bias."""


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


def why_not_precision(config: ModelConfig, precision: Precision, capability: tuple[int, int]) -> str | None:
    """What stands in the way of holding this model's weights in that tier, as a clause; None if nothing does.

    capability: the GPU's compute capability.
    """
    if precision is Precision.FP8 and capability < FP8_CAPABILITY:
        return _too_old("fp8 weights need", capability)
    for name, shape in expected_tensors(config).items():
        if precision is Precision.FP8 and name.endswith(".bias") and not name.endswith(_FP8_BIASES):
            return f"it has {name}: products in fp8 take biases of q, k and v only"
        is_head = name == ("embedding.weight" if config.tied_embeddings else "head.weight")
        if len(shape) != 2 or not (name.startswith("layers.") or (is_head and precision is Precision.Q4)):
            continue
        complaint = _shape_complaint(*shape, precision)
        if complaint:
            return f"{name} is {shape[0]} × {shape[1]}, and {complaint}"
    return None


def why_not_kv_dtype(kv_dtype: KvDtype, capability: tuple[int, int]) -> str | None:
    """What stands in the way of such a KV cache, as a clause; None if nothing does."""
    if kv_dtype is KvDtype.FP8 and capability < FP8_CAPABILITY:
        return _too_old("an fp8 KV cache needs", capability)
    return None


def _shape_complaint(n: int, k: int, precision: Precision) -> str | None:
    if precision is Precision.Q4 and (n % TILE_ROWS or k % BLOCK):
        return f"q4 holds matrices of multiples of {TILE_ROWS} rows and {BLOCK} columns only"
    if precision is Precision.FP8 and not fits_fp8(n, k):
        return f"fp8 holds matrices of multiples of {FP8_MULTIPLE} rows and columns only"
    if precision is Precision.FP8 and k > MAX_FP8_COLUMNS:
        return f"fp8 holds matrices of at most {MAX_FP8_COLUMNS} columns"
    return None


def _too_old(what_needs: str, capability: tuple[int, int]) -> str:
    needed, there = ("{}.{}".format(*version) for version in (FP8_CAPABILITY, capability))
    return f"{what_needs} compute capability {needed}, the GPU has {there}"


def _model_features(config: ModelConfig) -> Iterator[str]:
    if config.logit_softcap is not None:
        yield "softcapped logits"
    if config.vocab_size % _VECTOR or config.vocab_size > MAX_VOCAB:
        yield f"a vocabulary of {config.vocab_size} (must be a multiple of {_VECTOR}, at most {MAX_VOCAB})"
    if config.hidden_size % _VECTOR:
        yield f"hidden size {config.hidden_size} (must be a multiple of {_VECTOR})"
    widths = [layer.mixer.q_dim for layer in config.layers if isinstance(layer.mixer, AttentionSpec)]
    if widths and widths[-1] < max(widths):  # whose results would overwrite the rows carried behind its own
        yield "a last layer with narrower attention than others"


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
