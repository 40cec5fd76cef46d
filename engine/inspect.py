"""What was understood of a model on disk: for people, and to find out why a model is refused.

Opens the files, reads no weights. Knows no command line; `render` gives plain text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from engine.checkpoint.open import ModelFiles, open_files
from engine.config import (
    DeltaNetSpec,
    LayerSpec,
    ModelConfig,
    MoESpec,
    expected_tensors,
)
from engine.options import Precision
from engine.quantization.tensor_type import TensorType

_Q4_COLUMNS = 64
_Q4_TILE_ROW_BYTES = 36
"""On a GPU a row of q4_0 consists of parts of 64 columns: two blocks of 16 bytes and an f16 scale."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are alike."""

    layers: tuple[int, ...]
    mixer: str
    feed_forward: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Everything that `slipstream inspect` shows. Sizes are in bytes."""

    path: Path
    config: ModelConfig
    groups: tuple[LayerGroup, ...]
    parameters: int
    active_parameters: int
    """That one token passes through: a mixture's chosen experts only."""
    stored_bytes: dict[str, int]
    """By stored type, of the tensors in use."""
    bytes_by_precision: dict[str, int]
    """Of all weights in a GPU's memory, by tier: all bf16; or the layers' matrices in fp8; or these and the
    head in q4. The rest is bf16, a tied embedding too, beside which q4 has a head of its own."""
    kv_bytes_per_token: dict[str, int]
    """By KV precision, over all layers."""
    state_bytes_per_sequence: int
    """Recurrent and convolution state in float32."""
    used: int
    unused: tuple[str, ...]
    """Tensors of the file that are known and not needed."""
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def is_usable(self) -> bool:
        """Whether the model would load."""
        return not (self.unknown or self.missing or self.problems)

    def render(self) -> str:
        """Plain text, some twenty lines."""
        return "\n".join(_lines(self)) + "\n"


def inspect_model(path: Path) -> ModelReport:
    """Looks into a model folder or a .gguf file.

    Raises ConfigError for a configuration that is malformed or not supported, CheckpointError for files
    that are missing, truncated or malformed. Weights that do not fit the configuration are reported.
    """
    files = open_files(path)
    config, resolution = files.config, files.resolution
    shapes = expected_tensors(config)
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    kv_elements = config.kv_elements_per_token()
    return ModelReport(
        path=Path(path),
        config=config,
        groups=_groups(config),
        parameters=sum(sizes.values()),
        active_parameters=sum(sizes.values()) - _idle_parameters(config),
        stored_bytes=_stored_bytes(files),
        bytes_by_precision={
            str(tier): sum(_bytes_in(name, shape, tier) for name, shape in _held(config, tier).items())
            for tier in (Precision.BF16, Precision.FP8, Precision.Q4)
        },
        kv_bytes_per_token={"bf16": 2 * kv_elements, "fp8": kv_elements},
        state_bytes_per_sequence=4 * config.state_elements_per_sequence(),
        used=len({source for found in resolution.found.values() for source in found.sources}),
        unused=tuple(resolution.unused),
        unknown=tuple(resolution.unknown),
        missing=tuple(resolution.missing),
        problems=tuple(resolution.problems),
    )


def _groups(config: ModelConfig) -> tuple[LayerGroup, ...]:
    """Equal layers together, in the order of their first."""
    indices: dict[LayerSpec, list[int]] = {}
    for index, layer in enumerate(config.layers):
        indices.setdefault(layer, []).append(index)
    return tuple(
        LayerGroup(tuple(where), _describe_mixer(layer), _describe_feed_forward(layer))
        for layer, where in indices.items()
    )


def _describe_mixer(layer: LayerSpec) -> str:
    mixer = layer.mixer
    if isinstance(mixer, DeltaNetSpec):
        return (
            f"deltanet {mixer.n_key_heads} key × {mixer.key_head_dim}, "
            f"{mixer.n_value_heads} value × {mixer.value_head_dim}, conv {mixer.conv_kernel}"
        )
    parts = [f"{mixer.kind} {mixer.n_heads} heads, {mixer.n_kv_heads} kv × {mixer.head_dim}"]
    if mixer.window is not None:
        parts.append(f"window {mixer.window}")
    if mixer.rope is None:
        parts.append("no rope")
    else:
        rotated = f" of {mixer.rope.rotary_dim}" if mixer.rope.rotary_dim < mixer.head_dim else ""
        parts.append(f"rope {mixer.rope.kind}{rotated} θ {mixer.rope.theta:g}")
    flags = {
        "q/k norm": mixer.qk_norm is not None,
        "v norm": mixer.v_norm_eps is not None,
        "v = k": mixer.v_from_k,
        "gate": mixer.output_gate,
        "biases": mixer.qkv_bias,
    }
    return ", ".join(parts + [name for name, is_set in flags.items() if is_set])


def _describe_feed_forward(layer: LayerSpec) -> str:
    spec = layer.feed_forward
    if not isinstance(spec, MoESpec):
        return f"dense {spec.intermediate} {spec.activation}" + (", biases" if spec.bias else "")
    shared = f", shared {spec.shared_intermediate}" if spec.shared_intermediate is not None else ""
    raw = "" if spec.normalise_top_k else ", not renormalised"
    return f"{spec.top_k} of {spec.n_experts} experts × {spec.intermediate} {spec.activation}{shared}{raw}"


def _idle_parameters(config: ModelConfig) -> int:
    """Parameters of experts that one token does not choose."""
    specs = (layer.feed_forward for layer in config.layers)
    return sum(
        (spec.n_experts - spec.top_k) * 3 * spec.intermediate * config.hidden_size
        for spec in specs
        if isinstance(spec, MoESpec)
    )


def _stored_bytes(files: ModelFiles) -> dict[str, int]:
    """Bytes by type of the tensors in use, the most first."""
    used = {source for found in files.resolution.found.values() for source in found.sources}
    totals: Counter[str] = Counter()
    for name in used:
        source = files.sources[name]
        totals[str(source.type)] += source.read().nbytes
    return dict(totals.most_common())


def _held(config: ModelConfig, tier: Precision) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights in memory."""
    shapes = expected_tensors(config)
    if tier is Precision.Q4:
        shapes.setdefault("head.weight", shapes["embedding.weight"])
    return shapes


def _bytes_in(name: str, shape: tuple[int, ...], tier: Precision) -> int:
    """Bytes of a weight in that tier, or in bf16 if the tier cannot hold its rows."""
    is_linear = len(shape) == 2 and name.startswith("layers.") and "conv" not in name and "router" not in name
    if tier is Precision.FP8 and is_linear:
        return shape[0] * (shape[1] + 4)
    is_quantised = is_linear or name == "head.weight"
    if tier is Precision.Q4 and is_quantised and shape[1] % TensorType.Q4_0.block_elements == 0:
        return shape[0] * -(-shape[1] // _Q4_COLUMNS) * _Q4_TILE_ROW_BYTES
    return 2 * prod(shape)


def _lines(report: ModelReport) -> Iterator[str]:
    config = report.config
    yield str(report.path)
    yield _row("family", f"{config.family} ({config.architecture})")
    yield _row(
        "size",
        f"{config.n_layers} layers, hidden {config.hidden_size}, vocabulary {config.vocab_size:,}, "
        f"up to {config.max_sequence_length:,} tokens",
    )
    active = f", {report.active_parameters:,} active" if report.active_parameters < report.parameters else ""
    yield _row("parameters", f"{report.parameters:,}{active}")
    yield _row("head", "tied to the embedding" if config.tied_embeddings else "its own")
    for group in report.groups:
        yield _row(f"layers {_ranges(group.layers)}", f"{group.mixer}; {group.feed_forward}")
    yield _row("stored", ", ".join(f"{name} {_size(size)}" for name, size in report.stored_bytes.items()))
    yield _row(
        "weights in", ", ".join(f"{name} {_size(size)}" for name, size in report.bytes_by_precision.items())
    )
    yield _row(
        "KV per token",
        ", ".join(f"{name} {size:,} bytes" for name, size in report.kv_bytes_per_token.items()),
    )
    if report.state_bytes_per_sequence:
        yield _row("state", f"{_size(report.state_bytes_per_sequence)} per sequence")
    yield _row("tensors", f"{report.used} used, {len(report.unused)} known and not needed")
    for title, names in (("unused", report.unused), ("unknown", report.unknown), ("missing", report.missing)):
        yield from (_row(title, name) for name in _shortened(names))
    yield from (_row("problem", problem) for problem in _shortened(report.problems))
    yield _row("verdict", "can be loaded" if report.is_usable else "cannot be loaded")


def _row(title: str, text: str) -> str:
    return f"  {title:<14} {text}"


def _shortened(names: tuple[str, ...], limit: int = 8) -> Iterator[str]:
    yield from names[:limit]
    if len(names) > limit:
        yield f"… and {len(names) - limit} more"


def _ranges(indices: tuple[int, ...]) -> str:
    """(0, 1, 2, 4) as "0–2, 4"; long lists are cut."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(first) if first == last else f"{first}–{last}" for first, last in ranges]
    return ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")


def _size(n_bytes: int) -> str:
    """Decimal units, three digits."""
    value = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
        value /= 1000
    raise AssertionError
