"""Compiles CUDA C++ sources with NVRTC into cubins, in parallel, behind a content-hash disk cache.

Needs no GPU. Knows no kernel in particular: a CompileUnit says what to build. Only cubins are made,
never PTX: a cubin of any NVRTC 13 loads on any driver of CUDA 13, PTX of a newer NVRTC does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from kernels.errors import KernelCompileError, KernelError

SOURCE_FOLDER = Path(__file__).parent
INCLUDE_FOLDER = SOURCE_FOLDER / "include"
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
"""What every kernel must compile for."""

_CACHE_FORMAT = 2
_BASE_OPTIONS = ("-std=c++17", "--ptxas-options=-v", "-default-device", "--no-cache")
"""Where there is a GPU, NVRTC keeps what it compiled in the driver's cache and, when it finds it there, does
not report resources. Our cache makes that one superfluous."""

Progress = Callable[[str, int, int], None]
"""Called after each unit with its name, how many are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class CompileUnit:
    """One NVRTC program: a source file and the template instantiations wanted of it."""

    source: str
    """File name in the folder of this module."""
    expressions: tuple[str, ...]
    """C++ name expressions of the kernels, such as "gated_activation<true>"."""
    options: tuple[str, ...] = ()
    """Further NVRTC options."""
    may_spill: frozenset[str] = frozenset()
    """Expressions that are known to spill and are kept all the same."""

    @property
    def name(self) -> str:
        """For people: the source, and the first instantiation where there are several units of it."""
        return f"{self.source}:{self.expressions[0]}"


@dataclass(frozen=True, slots=True)
class KernelResources:
    """ptxas' report on one kernel."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True, slots=True)
class CompiledUnit:
    """A unit's cubin for one architecture."""

    unit: CompileUnit
    arch: str
    cubin: bytes
    lowered_names: dict[str, str]
    """Symbol in the cubin by name expression."""
    resources: dict[str, KernelResources]
    """By name expression."""
    from_cache: bool
    seconds: float
    """Spent compiling; 0 from the cache."""


def architecture_for(major: int, minor: int) -> str:
    """The compile target for a device's compute capability. Raises KernelError below 8.0."""
    if major < 8:
        raise KernelError(f"compute capability {major}.{minor} is not supported; 8.0 (A100) is the oldest")
    if major == 8:
        return f"sm_8{minor}"
    return f"sm_{major}{minor}a"


def default_cache_folder() -> Path:
    """The user's cache folder for compiled kernels."""
    return Path.home() / ".cache" / "slipstream" / "kernels"


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC library in use."""
    major, minor = _check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    return int(major), int(minor)


def compile_units(
    units: Sequence[CompileUnit],
    arch: str,
    *,
    cache_folder: Path | None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[CompiledUnit]:
    """Compiles the units (or takes them from the cache), several at once: NVRTC releases the GIL.

    Results come in the order of `units`. Raises KernelCompileError for the first unit that fails.
    """
    results: list[CompiledUnit | None] = [None] * len(units)
    workers = max(1, min(len(units), threads or len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(workers, thread_name_prefix="nvrtc") as pool:
        futures = {pool.submit(compile_unit, unit, arch, cache_folder): i for i, unit in enumerate(units)}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                index = futures[future]
                results[index] = future.result()
                if progress is not None:
                    progress(units[index].name, done, len(units))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [result for result in results if result is not None]


def compile_unit(unit: CompileUnit, arch: str, cache_folder: Path | None) -> CompiledUnit:
    """Compiles one unit, or takes it from the cache. Raises KernelCompileError."""
    if cache_folder is None:
        return _compile(unit, arch)
    cached = cached_unit(unit, arch, cache_folder)
    if cached is not None:
        return cached
    compiled = _compile(unit, arch)
    _write_cached(_cache_path(unit, arch, cache_folder), compiled)
    return compiled


def cached_unit(unit: CompileUnit, arch: str, cache_folder: Path) -> CompiledUnit | None:
    """The unit as the cache holds it; None if it would have to be compiled."""
    return _read_cached(_cache_path(unit, arch, cache_folder), unit, arch)


@cache
def include_folders() -> tuple[Path, ...]:
    """Our headers, then CUDA's from the nvidia-cuda-runtime wheel or an installed toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise KernelError(
            "CUDA's headers (cuda_bf16.h) were not found; install the nvidia-cuda-runtime package"
        )
    return (INCLUDE_FOLDER, Path(folder))


@cache
def _environment_hash() -> str:
    """Everything besides the unit itself that a cubin depends on."""
    digest = hashlib.sha256()
    digest.update(repr((_CACHE_FORMAT, nvrtc_version(), _nvrtc_build(), _BASE_OPTIONS)).encode())
    for header in sorted(INCLUDE_FOLDER.glob("*.cuh")):
        digest.update(header.name.encode())
        digest.update(header.read_bytes())
    for name in ("cuda.h", "cuda_bf16.hpp", "cuda_fp8.hpp", "cuda_fp16.hpp"):
        path = include_folders()[1] / name
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()


def _nvrtc_build() -> str:
    """Patch level of NVRTC, which nvrtcVersion does not tell."""
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return ""


def _cache_path(unit: CompileUnit, arch: str, cache_folder: Path) -> Path:
    return cache_folder / f"{Path(unit.source).stem}-{arch}-{_content_hash(unit, arch)}.kernel"


def _content_hash(unit: CompileUnit, arch: str) -> str:
    digest = hashlib.sha256(_environment_hash().encode())
    digest.update((SOURCE_FOLDER / unit.source).read_bytes())
    digest.update(repr((arch, unit.expressions, unit.options)).encode())
    return digest.hexdigest()[:32]


def _read_cached(path: Path, unit: CompileUnit, arch: str) -> CompiledUnit | None:
    """The cached unit, or None. A damaged file counts as absent and is compiled anew."""
    try:
        header, _, cubin = path.read_bytes().partition(b"\n")
        fields = json.loads(header)
        if hashlib.sha256(cubin).hexdigest() != fields["cubin_sha256"]:
            return None
    except (FileNotFoundError, ValueError, KeyError):
        return None
    resources = {name: KernelResources(**values) for name, values in fields["resources"].items()}
    return CompiledUnit(unit, arch, cubin, fields["lowered_names"], resources, True, 0.0)


def _write_cached(path: Path, compiled: CompiledUnit) -> None:
    """Written aside and renamed, so that another process sees the whole file or none."""
    header = {
        "unit": compiled.unit.name,
        "lowered_names": compiled.lowered_names,
        "resources": {name: asdict(value) for name, value in compiled.resources.items()},
        "cubin_sha256": hashlib.sha256(compiled.cubin).hexdigest(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        file.write(json.dumps(header).encode() + b"\n" + compiled.cubin)
    os.replace(file.name, path)


def _compile(unit: CompileUnit, arch: str) -> CompiledUnit:
    started = time.perf_counter()
    source = (SOURCE_FOLDER / unit.source).read_bytes()
    options = [f"--gpu-architecture={arch}", *_BASE_OPTIONS, *unit.options]
    options += [f"-I{folder}" for folder in include_folders()]
    program = _check(nvrtc.nvrtcCreateProgram(source, unit.source.encode(), 0, [], []), unit.name)[0]
    try:
        for expression in unit.expressions:
            _check(nvrtc.nvrtcAddNameExpression(program, expression.encode()), unit.name)
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _program_log(program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelCompileError(unit.source, arch, unit.expressions, log or str(status))
        lowered = {
            expression: _check(nvrtc.nvrtcGetLoweredName(program, expression.encode()), unit.name)[0].decode()
            for expression in unit.expressions
        }
        size = _check(nvrtc.nvrtcGetCUBINSize(program), unit.name)[0]
        cubin = bytearray(size)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), unit.name)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    resources = _resources(unit, lowered, parse_resource_log(log))
    return CompiledUnit(unit, arch, bytes(cubin), lowered, resources, False, time.perf_counter() - started)


def _resources(
    unit: CompileUnit, lowered: dict[str, str], by_symbol: dict[str, KernelResources]
) -> dict[str, KernelResources]:
    """By expression. Raises KernelError for a kernel that ptxas has not reported on."""
    if missing := [expression for expression, symbol in lowered.items() if symbol not in by_symbol]:
        raise KernelError(
            f"NVRTC compiled {', '.join(missing)} of kernels/{unit.source} without a report of its resources"
        )
    return {expression: by_symbol[symbol] for expression, symbol in lowered.items()}


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resource_log(log: str) -> dict[str, KernelResources]:
    """Reads `ptxas -v` output: resources by kernel symbol."""
    found: dict[str, KernelResources] = {}
    symbol, spilt = "", (0, 0)
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            symbol, spilt = entry[1], (0, 0)
        elif spills := _SPILLS.search(line):
            spilt = (int(spills[1]), int(spills[2]))
        elif (registers := _REGISTERS.search(line)) and symbol:
            shared = _SHARED.search(line)
            found[symbol] = KernelResources(int(registers[1]), *spilt, int(shared[1]) if shared else 0)
    return found


def _program_log(program: Any) -> str:
    size = _check(nvrtc.nvrtcGetProgramLogSize(program), "log")[0]
    text = bytearray(size)
    _check(nvrtc.nvrtcGetProgramLog(program, text), "log")
    return bytes(text).decode(errors="replace").rstrip("\0")


def _check(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        reason = nvrtc.nvrtcGetErrorString(status)[1].decode()
        raise KernelError(f"NVRTC failed on {what}: {reason}")
    return tuple(values)
