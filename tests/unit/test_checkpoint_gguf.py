"""GGUF files, sound and hostile. The public package writes the sound ones and is the oracle for them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import open_checkpoint
from engine.checkpoint.gguf_file import read_gguf
from engine.config import AttentionSpec, ModelConfig, RopeKind
from engine.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError
from engine.quantization import TensorType
from scripts.random_checkpoint import canonical_weights
from scripts.tiny_gguf import write_gguf
from tests.parity.families import CASES

QUANTS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
EPS = {"rms_norm_eps": 2.0**-16}
"""Exact in float32, as GGUF holds it."""


def _config(case: str, **more: Any) -> dict[str, Any]:
    return next(c for c in CASES if c.id == case).config | EPS | more


def _llama(**more: Any) -> dict[str, Any]:
    """Rows fill the K types' blocks of 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    return _config("llama-gqa7", **(sizes | {"num_key_value_heads": 2, "vocab_size": 300} | more))


@pytest.mark.parametrize("quant", QUANTS)
def test_every_type_is_read_as_the_public_package_reads_it(quant: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", _llama(), quant=quant, seed=3)
    checkpoint = open_checkpoint(path)
    public = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for canonical, name in (
        ("embedding.weight", "token_embd.weight"),
        ("layers.1.feed_forward.down.weight", "blk.1.ffn_down.weight"),
        ("layers.2.attention.v.weight", "blk.2.attn_v.weight"),
    ):
        tensor = checkpoint.tensor(canonical)
        assert tensor.type is TensorType[quant]
        assert tensor.data.tobytes() == public[name].data.tobytes()
        expected = gguf.quants.dequantize(public[name].data, public[name].tensor_type)
        np.testing.assert_array_equal(tensor.to_float32(), expected.reshape(tensor.shape))


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q4_0", "Q8_0"])
def test_permuted_rows_of_q_and_k_are_put_back(quant: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", _llama(num_hidden_layers=1), quant=quant, seed=5)
    weights = dict(canonical_weights(ModelConfig.from_hf(_llama(num_hidden_layers=1)), 5))
    checkpoint = open_checkpoint(path)
    for name in ("layers.0.attention.q.weight", "layers.0.attention.k.weight"):
        qtype = gguf.GGMLQuantizationType[quant]
        expected = gguf.quants.dequantize(gguf.quants.quantize(weights[name], qtype), qtype)
        np.testing.assert_array_equal(checkpoint.tensor(name).to_float32(), expected)


@pytest.mark.parametrize(
    "case",
    [
        "llama-biases",
        "llama-gqa7",
        "mistral-window-64",
        "qwen2-gqa7",
        "qwen3-gqa2",
        "qwen3-biases",
        "qwen3_moe-renormalised",
        "gemma4-k-is-v",
        "gemma4-own-v",
        "gemma4-types",
        "gemma4-wide",
    ],
)
def test_a_gguf_file_is_the_same_model_as_its_folder(case: str, tmp_path: Path) -> None:
    settings_ = _config(case)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", settings_, quant="F32", seed=3))
    expected = ModelConfig.from_hf(settings_)
    assert _comparable(checkpoint.config) == _comparable(expected)
    for theirs, ours in zip(checkpoint.config.layers, expected.layers, strict=True):
        assert isinstance(theirs.mixer, AttentionSpec)
        assert isinstance(ours.mixer, AttentionSpec)
        assert theirs.mixer.rope is not None
        assert ours.mixer.rope is not None
        np.testing.assert_allclose(
            theirs.mixer.rope.inverse_frequencies(),
            ours.mixer.rope.inverse_frequencies(),
            rtol=1e-6,
            atol=1e-29,
        )
    for name, values in canonical_weights(expected, 3):
        np.testing.assert_array_equal(checkpoint.tensor(name).to_float32(), values, err_msg=name)


def _comparable(config: ModelConfig) -> ModelConfig:
    """Without names and the way rope tables are described."""
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, rope=None))
        for layer in config.layers
        if isinstance(layer.mixer, AttentionSpec)
    )
    return replace(config, architecture="", layers=layers)


@pytest.mark.parametrize(
    "case", ["llama-biases", "qwen2-gqa7", "qwen3-gqa2", "qwen3_moe-renormalised", "gemma4-own-v"]
)
def test_tensor_names_are_those_of_the_public_tables(case: str, tmp_path: Path) -> None:
    settings_ = _config(case)
    names = read_gguf(write_gguf(tmp_path / "x.gguf", settings_, quant="F32")).tensors
    file_architecture = read_gguf(tmp_path / "x.gguf").metadata["general.architecture"]
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == file_architecture)
    layers = range(settings_["num_hidden_layers"])
    public = {
        gguf.TENSOR_NAMES[tensor].format(bid=layer)
        for tensor in gguf.MODEL_TENSORS[architecture]
        for layer in layers
    }
    assert {name.rpartition(".")[0] for name in names} <= public


# ---- models in parts


def _parts(tmp_path: Path) -> list[Path]:
    """A model in three parts, written by the public package."""
    weights = dict(canonical_weights(ModelConfig.from_hf(_llama(num_hidden_layers=1)), 0))
    whole = write_gguf(tmp_path / "whole.gguf", _llama(num_hidden_layers=1), quant="F32")
    tensors = list(gguf.GGUFReader(whole).tensors)
    assert len(tensors) == len(weights)
    paths = [tmp_path / f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        _write(
            path,
            architecture="llama",
            extra=lambda writer, number=number: _write_part(writer, number, tensors),
            by_hand=False,
            sizes=(256, 4, 2, 64),
        )
    return paths


def _write_part(writer: gguf.GGUFWriter, number: int, tensors: list[Any]) -> None:
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", 3)
    for tensor in tensors[number::3]:
        writer.add_tensor(tensor.name, np.asarray(tensor.data))


def test_a_model_in_parts_is_whole(tmp_path: Path) -> None:
    first = _parts(tmp_path)[0]
    parts, whole = open_checkpoint(first), open_checkpoint(tmp_path / "whole.gguf")
    assert list(parts.names()) == list(whole.names())
    for name in whole.names():
        assert parts.tensor(name).data.tobytes() == whole.tensor(name).data.tobytes()


def test_parts_that_are_not_all_there(tmp_path: Path) -> None:
    first, second, third = _parts(tmp_path)
    with pytest.raises(CheckpointError, match="not the first of its 3 parts"):
        open_checkpoint(second)
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match="stands in another part too"):
        open_checkpoint(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003.* cannot be read"):
        open_checkpoint(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="its name does not tell"):
        open_checkpoint(tmp_path / "renamed.gguf")


# ---- settings


def test_rope_frequency_factors_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    _write(path, extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    mixer = open_checkpoint(path).config.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert mixer.rope is not None
    assert mixer.rope.frequency_factors == tuple(factors.tolist())


def test_yarn_settings(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)

    _write(tmp_path / "x.gguf", extra=extra)
    mixer = open_checkpoint(tmp_path / "x.gguf").config.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert mixer.rope is not None
    assert (mixer.rope.kind, mixer.rope.factor, mixer.rope.original_max_position) == (
        RopeKind.YARN,
        4.0,
        1024,
    )


# ---- refusals


@pytest.mark.parametrize(
    ("settings_", "error", "problem"),
    [
        (
            {"architecture": "mamba"},
            UnsupportedModelError,
            "'mamba' is not supported; supported are gemma4, llama",
        ),
        ({"expert_count": 8}, UnsupportedModelError, "llama.expert_count = 8"),
        ({"head_count": 0}, ConfigError, "llama.attention.head_count must lie between"),
        ({"rope": "longrope"}, UnsupportedModelError, "'longrope'"),
        ({"quant": "Q2_K"}, CheckpointError, "type Q2_K; supported are"),
        ({"without": "blk.0.ffn_up.weight"}, CheckpointError, "lacks 1 tensor: blk.0.ffn_up.weight"),
        ({"without": "token_embd.weight"}, ConfigError, "vocab_size is missing"),
        ({"rows": 65}, CheckpointError, "shape"),
    ],
)
def test_unsuitable_files(
    settings_: dict[str, Any], error: type[Exception], problem: str, tmp_path: Path
) -> None:
    _write(tmp_path / "x.gguf", **settings_)
    with pytest.raises(error, match=problem) as caught:
        open_checkpoint(tmp_path / "x.gguf")
    assert "x.gguf" in str(caught.value)


def test_unknown_tensors_are_an_error(tmp_path: Path) -> None:
    _write(tmp_path / "x.gguf", extra=lambda w: w.add_tensor("blk.0.attn_sinks", np.zeros(4, np.float32)))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_sinks"):
        open_checkpoint(tmp_path / "x.gguf")


def _write(
    path: Path,
    *,
    architecture: str = "llama",
    expert_count: int = 0,
    head_count: int = 1,
    rope: str | None = None,
    quant: str = "F32",
    without: str = "",
    rows: int = 64,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    by_hand: bool = True,
    sizes: tuple[int, int, int, int] | None = None,
) -> None:
    """A Llama of one layer with hidden 64, by hand, with one thing wrong; or settings and `extra` alone.

    `sizes` are hidden, heads, kv heads and head_dim.
    """
    hidden, heads, kv_heads, head_dim = sizes or (64, head_count, head_count, 0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    if expert_count:
        writer.add_expert_count(expert_count)
    if rope is not None:
        writer.add_string("llama.rope.scaling.type", rope)
        writer.add_rope_scaling_factor(2.0)
    if extra is not None:
        extra(writer)
    matrices = ["token_embd", *(f"blk.0.{n}" for n in ("attn_q", "attn_k", "attn_v", "attn_output"))]
    matrices += [f"blk.0.{n}" for n in ("ffn_gate", "ffn_up", "ffn_down")]
    vectors = ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]
    for name in matrices + vectors if by_hand else []:
        if f"{name}.weight" == without:
            continue
        values = np.ones(64 if name in vectors else (rows, 64), np.float32)
        if quant != "F32" and name == "blk.0.ffn_up":
            blocks = np.zeros((64, 84), np.uint8)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[quant])
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- hostile tensor tables (for heads see test_model_files.py)

_U64 = struct.Struct("<Q")


def _raw(n_tensors: int = 0, n_keys: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + body


def _string(text: bytes, length: int | None = None) -> bytes:
    return _U64.pack(len(text) if length is None else length) + text


def _tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    head = _string(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims)
    return head + b"".join(_U64.pack(d) for d in dims) + struct.pack("<IQ", kind, offset)


HOSTILE = {
    "alignment 0": (
        _raw(n_keys=1, body=_string(b"general.alignment") + struct.pack("<II", 4, 0)),
        "alignment",
    ),
    "alignment 7": (
        _raw(n_keys=1, body=_string(b"general.alignment") + struct.pack("<II", 4, 7)),
        "alignment",
    ),
    "four billion dimensions": (_raw(1, body=_tensor(b"t", [1], n_dims=2**32 - 1)), "dimensions"),
    "dimension 0": (_raw(1, body=_tensor(b"t", [0])), "impossible shape"),
    "no dimensions": (_raw(1, body=_tensor(b"t", [])), "impossible shape"),
    "sizes that overflow": (_raw(1, body=_tensor(b"t", [2**32, 2**32, 2**32])), "beyond the file"),
    "unknown type": (_raw(1, body=_tensor(b"t", [32], kind=250)), "unknown type 250"),
    "offset beyond": (_raw(1, body=_tensor(b"t", [32], offset=2**63)), "beyond the file"),
    "offset unaligned": (_raw(1, body=_tensor(b"t", [1], offset=3) + b"\0" * 99), "beyond the file"),
    "blocks cut": (_raw(1, body=_tensor(b"t", [33], kind=2) + b"\0" * 99), "impossible shape"),
    "a tensor twice": (_raw(2, body=_tensor(b"t", [1]) * 2 + b"\0" * 99), "twice"),
    "overlap": (
        _raw(2, body=_tensor(b"a", [16]) + _tensor(b"b", [1], offset=32) + b"\0" * 200),
        "overlap",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_give_one_clear_error(name: str, tmp_path: Path) -> None:
    data, problem = HOSTILE[name]
    path = tmp_path / "evil.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_gguf(path)
    assert "evil.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", _llama(num_hidden_layers=1, vocab_size=260), quant="Q4_0")
    whole = path.read_bytes()
    header = read_gguf(path).tensors["token_embd.weight"].read()
    assert header.nbytes
    for size in [*range(0, 4000, 37), *range(4000, len(whole) - 1, 7919), len(whole) - 33]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            open_checkpoint(path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bytes_are_read_or_refused_never_worse(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.gguf"
    _write(path)
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, 1200))
        whole[position] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        checkpoint = open_checkpoint(path)
    except ModelError:
        return
    for name in checkpoint.names():
        checkpoint.tensor(name).to_float32()
