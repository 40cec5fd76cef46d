"""Rope settings in all the spellings that configurations use, read into one RopeSpec.

Newer files have `rope_parameters` (theta inside), older ones `rope_theta` beside `rope_scaling`; the
kind is called `rope_type` or `type`. Unknown kinds are refused: they would load and be silently wrong.
"""

from __future__ import annotations

import math

from engine.config.reader import REQUIRED, Section
from engine.config.rope import RopeKind, RopeSpec
from engine.errors import UnsupportedModelError

_MAX_THETA = 1e30
_MAX_FACTOR = 1e6

_MROPE = {"mrope"}
"""Multimodal rope gives all three axes the same position in text, which makes it the default rope."""


def read_rope(
    config: Section,
    head_dim: int,
    *,
    layer_type: str | None = None,
    default_theta: float = 1e4,
    default_partial: float | None = None,
    default_kind: RopeKind = RopeKind.DEFAULT,
    has_query_growth: bool = False,
) -> RopeSpec:
    """The table of one kind of layer. Raises ConfigError, UnsupportedModelError.

    `default_partial` is the share of the head that rotates; None: the family always rotates it whole.
    `has_query_growth`: the caller knows what llama_4_scaling_beta does; elsewhere it is refused.
    """
    settings = _settings(config, layer_type)
    if not has_query_growth and settings.number("llama_4_scaling_beta", 0.0) != 0.0:
        raise UnsupportedModelError(f"{settings.where}: llama_4_scaling_beta is not supported here")
    kind = _kind(settings, default_kind)
    outer_theta = config.number("rope_theta", default_theta, minimum=1.0, maximum=_MAX_THETA)
    theta = settings.number("rope_theta", outer_theta, minimum=1.0, maximum=_MAX_THETA)
    partial = _partial(settings, config, default_partial)
    if kind is RopeKind.PROPORTIONAL:
        return RopeSpec(
            kind,
            theta,
            head_dim,
            rotary_dim=head_dim,
            factor=settings.number("factor", 1.0, minimum=1e-6, maximum=_MAX_FACTOR),
            rotated_angles=int(partial * head_dim // 2),
        )
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or rotary_dim == 0:
        raise settings.error("partial_rotary_factor", f"gives an impossible rotary size of {rotary_dim}")
    base = RopeSpec(kind, theta, head_dim, rotary_dim)
    if kind is RopeKind.DEFAULT:
        return base
    return _scaled(base, settings, config)


def _partial(settings: Section, config: Section, default: float | None) -> float:
    key = "partial_rotary_factor"
    stated = settings.number(key, config.number(key, None, minimum=0, maximum=1), minimum=0, maximum=1)
    if default is None and stated not in (None, 1.0):
        raise UnsupportedModelError(
            f"{settings.where}: {key} = {stated} is not supported for this architecture"
        )
    return stated if stated is not None else default or 1.0


def _settings(config: Section, layer_type: str | None) -> Section:
    """The section that holds the kind and its factors, possibly empty."""
    found = config.section("rope_parameters") or config.section("rope_scaling")
    if found is None:
        return Section({}, config.where)
    if layer_type is not None and layer_type in found:
        found = found.section(layer_type) or found
    elif layer_type is None and any(isinstance(value, dict) for value in found.values.values()):
        raise UnsupportedModelError(f"{found.where}: rope settings by layer type are not supported here")
    return found


def _kind(settings: Section, default: RopeKind) -> RopeKind:
    name = settings.string("rope_type", settings.string("type", None))
    if name is None:
        return default
    if name in _MROPE:
        return RopeKind.DEFAULT
    try:
        return RopeKind(name)
    except ValueError:
        supported = ", ".join(RopeKind)
        raise UnsupportedModelError(
            f"{settings.where}: rope type {name!r} is not supported; supported are {supported}"
        ) from None


def _scaled(base: RopeSpec, settings: Section, config: Section) -> RopeSpec:
    """LINEAR, LLAMA3 and YARN: the base table with its factors."""
    key = "original_max_position_embeddings"
    original = config.integer(key, settings.integer(key, config.integer("max_position_embeddings", None)))
    if base.kind is RopeKind.LINEAR:
        factor = settings.number("factor", REQUIRED, minimum=1e-6, maximum=_MAX_FACTOR)
        return RopeSpec(base.kind, base.theta, base.head_dim, base.rotary_dim, factor)
    if original is None:
        raise settings.error(key, "is missing")
    if base.kind is RopeKind.LLAMA3:
        return _llama3(base, settings, original)
    return _yarn(base, settings, config, original)


def _llama3(base: RopeSpec, settings: Section, original: int) -> RopeSpec:
    low = settings.number("low_freq_factor", REQUIRED, minimum=1e-6)
    high = settings.number("high_freq_factor", REQUIRED, minimum=1e-6)
    if low >= high:
        raise settings.error("high_freq_factor", f"({high}) must be greater than low_freq_factor ({low})")
    return RopeSpec(
        base.kind,
        base.theta,
        base.head_dim,
        base.rotary_dim,
        factor=settings.number("factor", REQUIRED, minimum=1e-6, maximum=_MAX_FACTOR),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(base: RopeSpec, settings: Section, config: Section, original: int) -> RopeSpec:
    if base.theta <= 1:
        raise settings.error("rope_theta", f"must be greater than 1 for yarn, not {base.theta}")
    factor = settings.number("factor", None, minimum=1e-6, maximum=_MAX_FACTOR)
    if factor is None:
        factor = config.integer("max_position_embeddings", REQUIRED) / original
    attention_factor = settings.number("attention_factor", None, minimum=1e-3, maximum=1e3)
    if attention_factor is None:
        mscale = settings.number("mscale", 0.0, minimum=0.0, maximum=1e3)
        mscale_all = settings.number("mscale_all_dim", 0.0, minimum=0.0, maximum=1e3)
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        else:
            attention_factor = _mscale(factor, 1.0)
    return RopeSpec(
        base.kind,
        base.theta,
        base.head_dim,
        base.rotary_dim,
        factor=factor,
        original_max_position=original,
        beta_fast=settings.number("beta_fast", 0.0, minimum=0.0) or 32.0,
        beta_slow=settings.number("beta_slow", 0.0, minimum=0.0) or 1.0,
        truncate=settings.boolean("truncate", True),
        attention_factor=attention_factor,
    )


def _mscale(factor: float, weight: float) -> float:
    """How much yarn sharpens attention for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
