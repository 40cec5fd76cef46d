"""Hugging Face folders: shards, prefixes, heads, fused experts, FP8 scales, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.checkpoint import TensorType, open_checkpoint
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError, ModelError
from engine.quantization.fp8 import to_e4m3
from scripts.make_tiny_checkpoint import make_tiny_checkpoint
from scripts.random_checkpoint import canonical_weights, write_safetensors, write_shards
from tests.parity.families import CASES, build_checkpoint

Tensors = dict[str, NDArray[Any]]


def _tensors(folder: Path) -> Tensors:
    """What a one-shard f32 folder holds."""
    from safetensors.numpy import load_file

    return dict(load_file(folder / "model.safetensors"))


def _change(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = _tensors(folder)
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _set_config(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "model", dtype="f32", layers=1)


# ---- sound folders


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_family_is_found_whole(case: Any, tmp_path: Path) -> None:
    build_checkpoint(case, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    weights = dict(canonical_weights(checkpoint.config, case.seed))
    assert list(checkpoint.names()) == list(weights)
    for name, values in weights.items():
        tensor = checkpoint.tensor(name)
        assert tensor.shape == values.shape
        assert not tensor.data.flags.owndata
        np.testing.assert_array_equal(tensor.to_float32(), values, err_msg=name)
    assert checkpoint.unused == ()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_types(dtype: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path, dtype=dtype, shards=3))
    tensor = checkpoint.tensor("layers.1.feed_forward.down.weight")
    assert tensor.type is TensorType(dtype)
    assert tensor.data.shape == (64, 128 * tensor.type.block_bytes)
    expected = dict(canonical_weights(checkpoint.config, 0))[tensor.name]
    np.testing.assert_allclose(tensor.to_float32(), expected, rtol=2**-8)


def test_raw_bytes_are_those_of_the_file(folder: Path) -> None:
    raw = _tensors(folder)["model.layers.0.self_attn.q_proj.weight"]
    assert open_checkpoint(folder).tensor("layers.0.attention.q.weight").data.tobytes() == raw.tobytes()


def test_closing_leaves_tensors_in_hand_alive(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensor("final_norm.weight")
    assert np.isfinite(tensor.to_float32()).all()
    with pytest.raises(KeyError):
        checkpoint.tensor("final_norm.weight")


# ---- the head


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path, tied=True))
    assert "head.weight" not in checkpoint
    assert checkpoint.tensor("head.weight").name == "embedding.weight"


def test_a_stored_head_that_differs_beats_a_config_that_ties(folder: Path) -> None:
    checkpoint = open_checkpoint(_set_config(folder, tie_word_embeddings=True))
    assert not checkpoint.config.tied_embeddings
    assert checkpoint.tensor("head.weight").name == "head.weight"


def test_a_stored_head_that_repeats_the_embedding_is_known_and_unused(folder: Path) -> None:
    def repeat(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    checkpoint = open_checkpoint(_set_config(_change(folder, repeat), tie_word_embeddings=True))
    assert checkpoint.config.tied_embeddings
    assert checkpoint.unused == ("lm_head.weight",)


def test_a_missing_head_is_an_error_where_nothing_ties_it(folder: Path) -> None:
    _change(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: lm_head\.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("", "lm_head.weight"),
        ("model.", "lm_head.weight"),
        ("model.", "model.lm_head.weight"),
        ("language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("language_model.model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.language_model.", "model.language_model.lm_head.weight"),
    ],
)
def test_decoder_and_head_are_found_wherever_they_sit(prefix: str, head: str, folder: Path) -> None:
    def move(tensors: Tensors) -> None:
        for name in list(tensors):
            new = head if name == "lm_head.weight" else prefix + name.removeprefix("model.")
            tensors[new] = tensors.pop(name)

    _change(folder, move)
    checkpoint = open_checkpoint(folder)
    for name, values in canonical_weights(checkpoint.config, 0):
        np.testing.assert_array_equal(checkpoint.tensor(name).to_float32(), values)


# ---- tensors that nobody needs


def test_known_tensors_of_other_parts_are_left_alone(folder: Path) -> None:
    known = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "visual.blocks.0.attn.qkv.weight",
        "model.vision_tower.patch_conv.weight",
        "multi_modal_projector.linear_1.weight",
        "mtp.layers.0.input_layernorm.weight",
    ]
    _change(folder, lambda tensors: tensors.update({name: np.zeros(2, np.float32) for name in known}))
    assert sorted(open_checkpoint(folder).unused) == sorted(known)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.up_proj.weight", "model.extra"]
)
def test_unexpected_tensors_are_an_error(name: str, folder: Path) -> None:
    _change(folder, lambda tensors: tensors.update({name: np.zeros(2, np.float32)}))
    with pytest.raises(CheckpointError, match="silently wrong") as caught:
        open_checkpoint(folder)
    assert name in str(caught.value)


# ---- trouble


def test_missing_tensors_are_one_error_that_counts_them(folder: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".mlp." in n or "layernorm" in n]:
            del tensors[name]

    _change(folder, drop)
    with pytest.raises(CheckpointError, match=r"lacks 5 tensors: model\.layers\.0\.input_layernorm"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (np.zeros((64, 65), np.float32), r"has shape \[64, 65\] where \[64, 64\] is needed"),
        (np.zeros((64 * 64,), np.float32), r"has shape \[4096\]"),
        (np.zeros((64, 64), ml_dtypes.float8_e4m3fn), "is FP8 but has no scale"),
    ],
)
def test_wrong_shapes_and_types(values: NDArray[Any], problem: str, folder: Path) -> None:
    _change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.weight": values}))
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(folder)
    assert "o_proj" in str(caught.value)


def test_integer_weights_are_refused(folder: Path) -> None:
    from safetensors.numpy import save_file

    tensors = _tensors(folder)
    tensors["model.norm.weight"] = np.zeros(64, np.int64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has the unusable type I64"):
        open_checkpoint(folder)


def test_a_configuration_of_another_model_is_noticed(folder: Path) -> None:
    _set_config(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="lacks 9 tensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xff"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "not valid JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "convert them to safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "is empty"),
    ],
)
def test_broken_folders(break_it: Callable[[Path], object], problem: str, folder: Path) -> None:
    break_it(folder)
    with pytest.raises(ModelError, match=problem):
        open_checkpoint(folder)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "file.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"neither a model folder nor a \.gguf file"):
        open_checkpoint(tmp_path / "file.txt")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)


# ---- shards


def _sharded(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "model", dtype="f32", layers=1, shards=2)


def _edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda i: i.pop("weight_map"), "has no weight_map"),
        (lambda i: i.update(weight_map=[1]), "has no weight_map"),
        (lambda i: i["weight_map"].update(a="model-00009-of-00002.safetensors"), "lacks the shard"),
        (lambda i: i["weight_map"].update(a="../model-00001-of-00002.safetensors"), "impossible shard"),
        (lambda i: i["weight_map"].update(a="/etc/passwd"), "impossible shard"),
        (lambda i: i["weight_map"].update(a=7), "impossible shard"),
        (lambda i: i["weight_map"].update(a="model-00001-of-00002.safetensors"), "in no shard, such as 'a'"),
    ],
)
def test_broken_indices(edit: Callable[[dict[str, Any]], object], problem: str, tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    _edit_index(folder, edit)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(folder)


def test_missing_truncated_and_repeating_shards(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    second = folder / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated"):
        open_checkpoint(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match="lacks the shard model-00002"):
        open_checkpoint(folder)
    second.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="stands in two shards"):
        open_checkpoint(folder)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        open_checkpoint(folder)


# ---- FP8


def _block_scales(values: NDArray[np.float32], block: tuple[int, int]) -> NDArray[np.float32]:
    rows, columns = -(-values.shape[0] // block[0]), -(-values.shape[1] // block[1])
    scales = np.empty((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            part = values[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(part).max() / 448
    return scales


def _spread(
    scales: NDArray[np.float32], block: tuple[int, int], shape: tuple[int, int]
) -> NDArray[np.float32]:
    return np.kron(scales, np.ones(block, np.float32))[: shape[0], : shape[1]]


def _quantise(
    tensors: Tensors, scheme: str, block: tuple[int, int], suffix: str
) -> dict[str, NDArray[np.float32]]:
    """Turns the layers' matrices into FP8 in place; returns what they must come back as."""
    expected = {}
    for name in [n for n in tensors if ".layers." in n and tensors[n].ndim == 2 and "norm" not in n]:
        values = tensors[name]
        if scheme == "tensor":
            scale = np.asarray(np.abs(values).max() / 448, np.float32)
        elif scheme == "row":
            scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
        else:
            scale = _block_scales(values, block)
        full = _spread(scale, block, values.shape) if scheme == "block" else scale
        stored = to_e4m3(values / full).view(ml_dtypes.float8_e4m3fn)
        tensors[name] = stored
        tensors[f"{name}{suffix}"] = scale
        expected[name] = stored.astype(np.float32) * full
    return expected


def _compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("scheme", "suffix", "quantization"),
    [
        ("tensor", "_scale_inv", {"quant_method": "fp8", "activation_scheme": "static"}),
        ("tensor", "_scale", _compressed("tensor")),
        ("row", "_scale", _compressed("channel")),
        ("block", "_scale_inv", {"quant_method": "fp8", "weight_block_size": [48, 40]}),
    ],
)
def test_fp8_weights(scheme: str, suffix: str, quantization: dict[str, Any], folder: Path) -> None:
    tensors = _tensors(folder)
    expected = _quantise(tensors, scheme, (48, 40), suffix)
    tensors["model.layers.0.self_attn.q_proj.input_scale"] = np.ones(1, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    checkpoint = open_checkpoint(_set_config(folder, quantization_config=quantization))
    for canonical, name in (
        ("layers.0.attention.k.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("layers.0.feed_forward.up.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.0.feed_forward.down.weight", "model.layers.0.mlp.down_proj.weight"),
    ):
        tensor = checkpoint.tensor(canonical)
        assert tensor.type is TensorType.F8_E4M3
        assert tensor.scale is not None
        assert tensor.data.tobytes() == tensors[name].tobytes()
        np.testing.assert_array_equal(tensor.to_float32(), expected[name])
    assert checkpoint.unused == ("model.layers.0.self_attn.q_proj.input_scale",)


@pytest.mark.parametrize("scheme", ["tensor", "row", "block"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_no_number(scheme: str, wrong: float, folder: Path) -> None:
    quantization = {
        "tensor": _compressed("tensor"),
        "row": _compressed("channel"),
        "block": {"quant_method": "fp8", "weight_block_size": [48, 40]},
    }[scheme]
    tensors = _tensors(folder)
    _quantise(tensors, scheme, (48, 40), "_scale")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name] = np.array(tensors[name])
    tensors[name].reshape(-1)[-1] = wrong
    write_safetensors(folder / "model.safetensors", tensors)
    checkpoint = open_checkpoint(_set_config(folder, quantization_config=quantization))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale.*must be finite"):
        checkpoint.tensor("layers.0.feed_forward.up.weight")


@pytest.mark.parametrize("scale_shape", [(63, 1), (2,), (2, 3), (64, 64)])
def test_fp8_scales_that_do_not_fit(scale_shape: tuple[int, ...], folder: Path) -> None:
    def change(tensors: Tensors) -> None:
        name = "model.layers.0.self_attn.o_proj.weight"
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale"] = np.ones(scale_shape, np.float32)

    _set_config(_change(folder, change), quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"does not fit .*o_proj.* as a scale"):
        open_checkpoint(folder)


def test_a_scale_beside_a_plain_weight_is_refused(folder: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    _change(folder, lambda tensors: tensors.update({name: np.ones(1, np.float32)}))
    with pytest.raises(CheckpointError, match="must not have a scale"):
        open_checkpoint(folder)


@pytest.mark.parametrize("scheme", ["tensor", "row", "block"])
def test_fp8_in_fused_experts(scheme: str, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.id == "qwen3_5_moe-fused")
    build_checkpoint(case, tmp_path)
    tensors, block = _tensors(tmp_path), (12, 40)
    expected = {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj")) and tensors[n].ndim == 3]:
        stacked = tensors.pop(name)
        parts = [{f"model.layers.{e}": values} for e, values in enumerate(stacked)]
        done = [_quantise(part, scheme, block, "_s") for part in parts]
        tensors[name] = np.stack([part[f"model.layers.{e}"] for e, part in enumerate(parts)])
        scales = [np.atleast_1d(part[f"model.layers.{e}_s"]) for e, part in enumerate(parts)]
        tensors[f"{name}_scale_inv"] = np.stack(scales)
        expected[name] = np.stack([values[f"model.layers.{e}"] for e, values in enumerate(done)])
    write_shards(tmp_path, tensors, 1)
    quantization = {"quant_method": "fp8", "weight_block_size": list(block) if scheme == "block" else None}
    checkpoint = open_checkpoint(_set_config(tmp_path, quantization_config=quantization))
    stem = "model.layers.1.mlp.experts"
    for expert in (0, 5):
        gate_up, down = expected[f"{stem}.gate_up_proj"][expert], expected[f"{stem}.down_proj"][expert]
        for part, values in (("gate", gate_up[:24]), ("up", gate_up[24:]), ("down", down)):
            tensor = checkpoint.tensor(f"layers.1.moe.experts.{expert}.{part}.weight")
            np.testing.assert_array_equal(tensor.to_float32(), values, err_msg=part)


def test_config_is_that_of_from_hf(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert open_checkpoint(folder).config == ModelConfig.from_hf(config)
