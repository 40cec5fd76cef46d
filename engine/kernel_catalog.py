"""What CUDA kernels there are, what each costs, and which are compiled already; and compiling them ahead.

Needs NVRTC, not a GPU. Knows no model and no command line. Importing this imports no CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import KernelToolsError, ModelError

if TYPE_CHECKING:
    from kernels.compiler import CompiledUnit, CompileUnit

KernelProgress = Callable[[str, int, int], None]
"""Called after each compiled unit with its name, how many are done, and how many there are."""

_NEEDED = ("cuda.bindings", "cuda.pathfinder")


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel, as compiled for one architecture. Sizes are None until it is."""

    family: str
    source: str
    """File in kernels/."""
    name: str
    """The C++ name expression."""
    arch: str
    is_cached: bool
    registers: int | None = None
    """Of one thread."""
    spill_bytes: int | None = None
    """Stored to and loaded from local memory by one thread."""
    shared_bytes: int | None = None
    """Static shared memory of one block; what a launch asks for on top depends on its shape."""
    may_spill: bool = False
    """Its table says that it is known to spill."""


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """What building has done for one architecture."""

    arch: str
    kernels: tuple[KernelEntry, ...]
    compiled: int
    """Units that were not in the cache."""
    units: int
    compile_seconds: float
    """Summed over threads."""


def kernel_cache_folder() -> Path:
    """Where compiled kernels are kept."""
    with _kernel_tools():
        from kernels.compiler import default_cache_folder

        return default_cache_folder()


def default_architectures() -> tuple[str, ...]:
    """That of the first GPU, or where there is none all that kernels are kept compilable for."""
    with _kernel_tools():
        from engine.cuda.device import choose_gpu
        from kernels.compiler import ARCHITECTURES, architecture_for

        try:
            return (architecture_for(*choose_gpu(0).compute_capability),)
        except ModelError:
            return ARCHITECTURES


def all_architectures() -> tuple[str, ...]:
    """All that kernels are kept compilable for, such as "sm_90a"."""
    with _kernel_tools():
        from kernels.compiler import ARCHITECTURES

        return ARCHITECTURES


def list_kernels(arch: str, cache_folder: Path | None = None) -> list[KernelEntry]:
    """Every kernel, family by family; what it costs, if the cache holds it. Raises KernelToolsError."""
    _check_architecture(arch)
    with _kernel_tools():
        from kernels.compiler import cached_unit, default_cache_folder
        from kernels.registry import FAMILIES

        folder = cache_folder or default_cache_folder()
        return [
            entry
            for family, units in FAMILIES.items()
            for unit in units
            for entry in _entries(family, unit, arch, cached_unit(unit, arch, folder))
        ]


def build_kernels(
    arch: str, progress: KernelProgress | None = None, cache_folder: Path | None = None
) -> KernelBuild:
    """Compiles what the cache lacks, on all cores. Raises KernelToolsError with the compiler's words."""
    _check_architecture(arch)
    with _kernel_tools():
        from kernels.compiler import compile_units, default_cache_folder
        from kernels.registry import FAMILIES, all_units

        units = all_units()
        built = compile_units(
            units, arch, cache_folder=cache_folder or default_cache_folder(), progress=progress
        )
        by_unit = dict(zip(units, built, strict=True))
        entries = tuple(
            entry
            for family, members in FAMILIES.items()
            for unit in members
            for entry in _entries(family, unit, arch, by_unit[unit])
        )
        fresh: Sequence[CompiledUnit] = [unit for unit in built if not unit.from_cache]
        return KernelBuild(arch, entries, len(fresh), len(built), sum(unit.seconds for unit in fresh))


def _entries(
    family: str, unit: CompileUnit, arch: str, compiled: CompiledUnit | None
) -> Iterator[KernelEntry]:
    for name in unit.expressions:
        if compiled is None:
            yield KernelEntry(family, unit.source, name, arch, False, may_spill=name in unit.may_spill)
            continue
        cost = compiled.resources[name]
        spilled = cost.spill_store_bytes + cost.spill_load_bytes
        yield KernelEntry(
            family, unit.source, name, arch, True, cost.registers, spilled, cost.static_shared_bytes,
            name in unit.may_spill,
        )  # fmt: skip


def _check_architecture(arch: str) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None or int(match[1]) < 80:
        raise KernelToolsError(
            f"{arch!r} is no architecture to compile for; the oldest is sm_80, an H100 or H200 is sm_90a"
        )


@contextmanager
def _kernel_tools() -> Iterator[None]:
    """Names what is not installed, before and while kernels are used."""
    for module in _NEEDED:
        if not _is_installed(module):
            raise KernelToolsError(
                f"Kernels cannot be compiled here: {module} is not installed "
                "(pip install 'slipstream-serve[cuda]')."
            )
    from cuda.pathfinder import DynamicLibNotFoundError

    from kernels.errors import KernelError

    try:
        yield
    except KernelError as error:
        raise KernelToolsError(str(error)) from error
    except DynamicLibNotFoundError as error:
        reason = " ".join(str(error).split())[:200]
        raise KernelToolsError(
            f"Kernels cannot be compiled here: NVRTC was not found ({reason}). "
            "pip install 'slipstream-serve[cuda]' brings it."
        ) from error


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would stand in
        return False
