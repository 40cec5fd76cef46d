"""Every kernel compiles for every architecture without a GPU, and spills only where its table admits it."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from kernels import compiler, registry
from kernels.compiler import ARCHITECTURES, CompileUnit, KernelResources, compile_unit, compile_units
from kernels.errors import KernelCompileError, KernelError

SMALL = CompileUnit("activation.cu", ("gated_activation<false, false>",))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    units = registry.all_units()
    for compiled in compile_units(units, arch, cache_folder=compiler.default_cache_folder()):
        assert compiled.cubin[:4] == b"\x7fELF"
        for expression, resources in compiled.resources.items():
            where = f"{expression} of {compiled.unit.source} on {arch}: {resources}"
            assert not resources.spills or expression in compiled.unit.may_spill, where
            assert 0 < resources.registers <= 255, where
            assert resources.static_shared_bytes <= 48 * 1024, where


def test_every_source_belongs_to_a_family() -> None:
    sources = {path.name for path in compiler.SOURCE_FOLDER.glob("*.cu")}
    assert sources == {unit.source for unit in registry.all_units()}


def test_a_unit_is_compiled_once_and_then_read(tmp_path: Path) -> None:
    first = compile_unit(SMALL, "sm_90a", tmp_path)
    second = compile_unit(SMALL, "sm_90a", tmp_path)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert dataclasses.replace(second, from_cache=False, seconds=first.seconds) == first
    other = compile_unit(SMALL, "sm_80", tmp_path)
    assert not other.from_cache
    assert len(list(tmp_path.iterdir())) == 2


def test_a_changed_option_or_source_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_unit(SMALL, "sm_90a", tmp_path)
    optioned = dataclasses.replace(SMALL, options=("-DANYTHING=1",))
    assert not compile_unit(optioned, "sm_90a", tmp_path).from_cache
    changed = tmp_path / "sources"
    changed.mkdir()
    (changed / SMALL.source).write_text(
        (compiler.SOURCE_FOLDER / SMALL.source).read_text() + "\n// changed\n"
    )
    monkeypatch.setattr(compiler, "SOURCE_FOLDER", changed)
    assert not compile_unit(SMALL, "sm_90a", tmp_path).from_cache


@pytest.mark.parametrize("damage", [b"", b"no header at all", b'{"lowered_names": {}}\nrest'])
def test_a_damaged_cache_file_is_replaced(tmp_path: Path, damage: bytes) -> None:
    compile_unit(SMALL, "sm_90a", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert not compile_unit(SMALL, "sm_90a", tmp_path).from_cache
    assert compile_unit(SMALL, "sm_90a", tmp_path).from_cache


def test_processes_that_compile_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    threads = [threading.Thread(target=compile_unit, args=(SMALL, "sm_90a", tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [path.suffix for path in tmp_path.iterdir()] == [".kernel"]
    assert compile_unit(SMALL, "sm_90a", tmp_path).from_cache


def test_an_error_tells_the_file_and_the_compilers_words(tmp_path: Path) -> None:
    wrong = dataclasses.replace(SMALL, expressions=("no_such_kernel<1>",))
    with pytest.raises(KernelCompileError) as caught:
        compile_units([SMALL, wrong], "sm_90a", cache_folder=tmp_path)
    assert caught.value.source == "activation.cu"
    assert "no_such_kernel" in str(caught.value)
    assert "no_such_kernel" in caught.value.log


def test_a_compiler_that_does_not_report_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_program_log", lambda program: "")
    with pytest.raises(KernelError, match=r"activation<false, false> of kernels/activation\.cu without"):
        compile_unit(SMALL, "sm_90a", cache_folder=None)


def test_progress_counts_every_unit(tmp_path: Path) -> None:
    units = [SMALL, dataclasses.replace(SMALL, expressions=("gated_activation<true, false>",))]
    seen: list[tuple[int, int]] = []
    compile_units(
        units, "sm_90a", cache_folder=tmp_path, progress=lambda _, done, all_: seen.append((done, all_))
    )
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")],
)
def test_architecture_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert compiler.architecture_for(*capability) == arch


def test_old_devices_are_refused() -> None:
    with pytest.raises(KernelError, match=r"7\.5"):
        compiler.architecture_for(7, 5)


def test_resource_log_is_read() -> None:
    log = """ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers"""
    assert compiler.parse_resource_log(log) == {
        "first": KernelResources(64, 12, 16, 2048),
        "second": KernelResources(20, 0, 0, 0),
    }
