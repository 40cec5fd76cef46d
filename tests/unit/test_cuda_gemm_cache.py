"""Tuned matrix products on disk: round trips, other GPUs' and libraries' files, broken files, two writers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

pytest.importorskip("nvmath")
pytest.importorskip("cuda.bindings")

from engine.cuda.cublaslt import Algorithm
from engine.cuda.gemm_cache import GemmCache, Tuned
from engine.cuda.gemm_key import Epilogue, GemmKey
from engine.cuda.gemm_tuning import copies, scratch_bytes
from kernels.tensor import DType

KEY = GemmKey(8, 4096, 2048)
TUNED = Tuned(Algorithm((1, 2**64 - 1, 3, 4, 5, 6, 7, 0), 1 << 20), 12.5, 14.25)


def _cache(
    folder: Path, *, gpu: str = "NVIDIA H200", multiprocessors: int = 132, library: str = "13.1.0"
) -> GemmCache:
    return GemmCache(folder, gpu, multiprocessors, library)


def test_what_was_tuned_is_found_again(tmp_path: Path) -> None:
    cache = _cache(tmp_path / "not" / "yet")
    assert cache.get(KEY) is None
    cache.put(KEY, TUNED)
    cache.save()
    assert _cache(tmp_path / "not" / "yet").get(KEY) == TUNED


@pytest.mark.parametrize(
    "other",
    [
        GemmKey(9, 4096, 2048),
        GemmKey(8, 2048, 4096),
        GemmKey(8, 4096, 2048, y=DType.F32),
        GemmKey(8, 4096, 2048, w=DType.E4M3),
        GemmKey(8, 4096, 2048, x=DType.E4M3),
        GemmKey(8, 4096, 2048, epilogue=Epilogue.ADD),
    ],
    ids=str,
)
def test_every_field_of_a_key_counts(tmp_path: Path, other: GemmKey) -> None:
    cache = _cache(tmp_path)
    cache.put(KEY, TUNED)
    cache.save()
    assert _cache(tmp_path).get(other) is None


@pytest.mark.parametrize(
    "other",
    [{"gpu": "NVIDIA H100"}, {"multiprocessors": 16}, {"library": "13.2.0"}],
    ids=["gpu", "slice", "library"],
)
def test_nothing_is_taken_from_another_gpu_or_library(tmp_path: Path, other: dict[str, object]) -> None:
    cache = _cache(tmp_path)
    cache.put(KEY, TUNED)
    cache.save()
    elsewhere = _cache(tmp_path, **other)  # type: ignore[arg-type]
    assert elsewhere.get(KEY) is None
    elsewhere.path.write_bytes(cache.path.read_bytes())
    with capture_logs() as logs:
        assert _cache(tmp_path, **other).get(KEY) is None  # type: ignore[arg-type]
    assert [entry["event"] for entry in logs] == ["gemm_cache_not_read"]


def _with_plan(**changes: object) -> str:
    entry = {"algorithm": ["0x1"] * 8, "workspace": 0, "us": 1.0, "heuristic_us": 1.0} | changes
    return json.dumps(
        {
            "format": 1, "gpu": "NVIDIA H200", "multiprocessors": 132, "cublaslt": "13.1.0",
            "plans": {str(KEY): entry},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 0}',
        _with_plan(algorithm=["0x1"] * 7),
        _with_plan(algorithm=["zz"] * 8),
        _with_plan(algorithm=["-0x1"] * 8),
        _with_plan(algorithm=["0x" + "f" * 17] * 8),
        _with_plan(algorithm=[1] * 8),
        _with_plan(workspace=-1),
        _with_plan(workspace="1"),
        _with_plan(us="soon"),
        _with_plan(us=None),
    ],
)
def test_a_broken_file_counts_as_empty_and_is_replaced(tmp_path: Path, text: str) -> None:
    path = _cache(tmp_path).path
    path.write_text(text)
    with capture_logs() as logs:
        cache = _cache(tmp_path)
        assert len(cache) == 0
        cache.put(KEY, TUNED)
        cache.save()
    assert {entry["event"] for entry in logs} == {"gemm_cache_not_read"}
    assert _cache(tmp_path).get(KEY) == TUNED


def test_a_sound_file_of_that_form_is_read(tmp_path: Path) -> None:
    """The oracle for the test above: the unbroken text is accepted."""
    _cache(tmp_path).path.write_text(_with_plan())
    assert _cache(tmp_path).get(KEY) == Tuned(Algorithm((1,) * 8, 0), 1.0, 1.0)


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    one, two = _cache(tmp_path), _cache(tmp_path)
    other = GemmKey(16, 4096, 2048)
    one.put(KEY, TUNED)
    two.put(other, TUNED)
    one.save()
    two.save()
    both = _cache(tmp_path)
    assert both.get(KEY) == both.get(other) == TUNED
    assert [path.name for path in tmp_path.iterdir()] == [both.path.name]


def test_a_folder_that_cannot_be_written_is_logged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with capture_logs() as logs:
        cache = _cache(tmp_path / "file" / "below")
        cache.put(KEY, TUNED)
        cache.save()
    assert "gemm_cache_not_written" in [entry["event"] for entry in logs]
    assert cache.get(KEY) == TUNED


def test_tuning_reads_weights_from_memory() -> None:
    """All copies together are several times L2, up to a bound for tiny ones."""
    l2 = 60 << 20
    for key in (KEY, GemmKey(1, 2048, 2048), GemmKey(1, 151936, 4096)):
        assert copies(key, l2) * key.weight_bytes >= 4 * l2
        assert scratch_bytes(key, l2, 0) >= copies(key, l2) * key.weight_bytes
    assert copies(GemmKey(1, 104, 72), l2) == 64


def test_bytes_and_flops_of_a_product() -> None:
    key = GemmKey(3, 5, 7, y=DType.F32, epilogue=Epilogue.ADD)
    assert key.flops == 2 * 3 * 5 * 7
    assert key.bytes == 2 * (3 * 7 + 5 * 7) + 4 * 2 * (3 * 5)
    assert str(key) == "3×5×7 bf16·bf16→f32 add"
