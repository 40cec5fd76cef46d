"""config.json to a ModelConfig: finds the text model and its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.config import gemma, llama, qwen, qwen3_5
from engine.config.families import Family
from engine.config.model import ModelConfig
from engine.config.reader import Section
from engine.config.weights_reader import read_weight_format
from engine.errors import UnsupportedModelError

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *qwen.FAMILIES,
    *qwen3_5.FAMILIES,
    *gemma.FAMILIES,
)


def model_config_from_hf(config: Mapping[str, object], *, where: str = "config.json") -> ModelConfig:
    """Reads a parsed config.json.

    Raises UnsupportedModelError for what is not implemented, by name; ConfigError for what is malformed.
    """
    top = Section(config, where)
    text = _text_section(top)
    family, architecture = _find_family(top, text)
    model = family.read(text, architecture)
    return replace(model, weight_format=read_weight_format(text))


def _text_section(top: Section) -> Section:
    """Wrappers nest the text model; settings they repeat at the top are the wrapper's to decide."""
    nested = top.section("text_config")
    if nested is None:
        return top
    values = dict(nested.values)
    for key in ("tie_word_embeddings", "quantization_config"):
        if key in top:
            values[key] = top.values[key]
    return Section(values, nested.where)


def _find_family(top: Section, text: Section) -> tuple[Family, str]:
    """By the checkpoint's architecture, and by model_type where one architecture wraps several."""
    architectures = top.strings("architectures", ())
    model_type = text.string("model_type", "")
    by_type = next((family for family in FAMILIES if model_type in family.model_types), None)
    if not architectures:
        if by_type is None:
            raise UnsupportedModelError(_refusal(f"model_type {model_type!r}"))
        return by_type, model_type
    name = architectures[0]
    candidates = [family for family in FAMILIES if name in family.architectures]
    if not candidates:
        raise UnsupportedModelError(_refusal(f"architecture {name!r}"))
    if text is not top and by_type is not None:
        return by_type, name
    if text is not top and model_type:
        raise UnsupportedModelError(_refusal(f"architecture {name!r} around a {model_type!r} text model"))
    return candidates[0], name


def _refusal(what: str) -> str:
    supported = sorted({name for family in FAMILIES for name in family.architectures})
    return f"{what} is not supported; supported architectures are {', '.join(supported)}"


def family_named(name: str) -> Family:
    """The entry of FAMILIES whose name a ModelConfig carries."""
    return next(family for family in FAMILIES if family.name == name)
