"""Reads `quantization_config`: which scheme the checkpoint's linear layers are stored in."""

from __future__ import annotations

from engine.config.reader import REQUIRED, Section
from engine.config.weights import WeightFormat, WeightScheme
from engine.errors import UnsupportedModelError

_SUPPORTED = (
    "fp8 (e4m3, one scale per tensor or per block) and compressed-tensors float-quantized "
    "(8 bits; one scale per tensor, channel or block)"
)


def read_weight_format(config: Section) -> WeightFormat:
    """Raises UnsupportedModelError for a scheme that is not implemented."""
    section = config.section("quantization_config") or config.section("compression_config")
    if section is None:
        if "quantization" in config:
            raise _refusal(config, "MLX quantization")
        return WeightFormat()
    method = section.string("quant_method", REQUIRED)
    if method == "fp8":
        return _fp8(section)
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    raise _refusal(section, f"quantization {method!r}")


def _refusal(section: Section, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{section.where}: {what} is not supported; supported are {_SUPPORTED}")


def _fp8(section: Section) -> WeightFormat:
    fmt = section.string("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(section, f"fp8 format {fmt!r}")
    block = _block(section, "weight_block_size")
    if block is None:
        return WeightFormat(WeightScheme.FP8_TENSOR)
    return WeightFormat(WeightScheme.FP8_BLOCK, block)


def _compressed_tensors(section: Section) -> WeightFormat:
    layout = section.string("format", "")
    if layout not in ("float-quantized", "naive-quantized"):
        raise _refusal(section, f"compressed-tensors format {layout!r}")
    groups = section.section("config_groups")
    names = list(groups.values) if groups is not None else []
    if groups is None or len(names) != 1:
        raise _refusal(section, f"compressed-tensors with {len(names)} groups of layers")
    group = groups.section(names[0])
    weights = group.section("weights") if group is not None else None
    if weights is None:
        raise section.error("config_groups", "does not describe the weights")
    kind, bits = weights.string("type", "float"), weights.integer("num_bits", REQUIRED)
    if kind != "float" or bits != 8 or not weights.boolean("symmetric", True):
        raise _refusal(weights, f"compressed-tensors with weights of type {kind!r} and {bits} bits")
    strategy = weights.string("strategy", REQUIRED)
    if strategy == "tensor":
        return WeightFormat(WeightScheme.FP8_TENSOR)
    if strategy == "channel":
        return WeightFormat(WeightScheme.FP8_ROW)
    if strategy == "block" and (block := _block(weights, "block_structure")) is not None:
        return WeightFormat(WeightScheme.FP8_BLOCK, block)
    raise _refusal(weights, f"compressed-tensors strategy {strategy!r}")


def _block(section: Section, key: str) -> tuple[int, int] | None:
    sizes = section.integers(key, None)
    if sizes is None:
        return None
    if len(sizes) != 2 or min(sizes) < 1:
        raise section.error(key, f"must be two positive integers, not {list(sizes)}")
    return sizes[0], sizes[1]
