"""`slipstream kernels` on a registry of one small kernel, in a cache of its own, without a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from engine import kernel_catalog
from kernels import activation, registry, skinny
from kernels.compiler import CompileUnit
from kernels.skinny import Ring
from service.cli.app import app

SMALL = CompileUnit(activation.SOURCE, activation.UNITS[0].expressions[:1])


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    use(monkeypatch, SMALL)


def use(monkeypatch: pytest.MonkeyPatch, unit: CompileUnit) -> None:
    monkeypatch.setattr(registry, "FAMILIES", {"activation": (unit,)})
    monkeypatch.setattr(registry, "all_units", lambda: (unit,))


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["kernels", *arguments])


def test_a_kernel_is_listed_built_and_listed_with_its_cost(tmp_path: Path) -> None:
    (before,) = json.loads(cli("list", "--arch", "sm_90a", "--json").stdout)
    assert (before["is_cached"], before["registers"]) == (False, None)
    assert "not built" in cli("list", "--arch", "sm_90a").stdout

    built = cli("build", "--arch", "sm_90a")
    assert built.exit_code == 0, built.output
    assert "compiled 1 units" in built.stdout
    assert str(tmp_path) in built.stdout

    (after,) = json.loads(cli("list", "--arch", "sm_90a", "--json").stdout)
    assert (after["family"], after["source"]) == ("activation", "activation.cu")
    assert after["is_cached"]
    assert 0 < after["registers"] <= 255
    assert after["spill_bytes"] == 0
    assert "all compiled already" in cli("build", "--arch", "sm_90a").stdout
    (other,) = json.loads(cli("list", "--arch", "sm_80", "--json").stdout)
    assert not other["is_cached"]


def test_all_names_every_architecture() -> None:
    entries = json.loads(cli("list", "--all", "--json").stdout)
    assert {entry["arch"] for entry in entries} == {"sm_80", "sm_90a", "sm_100a"}


@pytest.mark.parametrize("arch", ["sm_70", "sm90", "hopper"])
def test_what_is_no_architecture_is_refused(arch: str) -> None:
    result = cli("build", "--arch", arch)
    assert result.exit_code == 1
    assert f"'{arch}' is no architecture" in result.stderr


def test_all_and_one_contradict_each_other() -> None:
    assert cli("build", "--all", "--arch", "sm_80").exit_code == 2


def test_a_kernel_that_does_not_compile_is_told_in_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, CompileUnit("activation.cu", ("no_such_kernel<1>",)))
    result = cli("build", "--arch", "sm_90a")
    assert result.exit_code == 1
    assert "no_such_kernel" in result.stderr
    assert "Traceback" not in result.output


def test_a_spill_that_no_table_admits_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = Ring(warps=16, share=16, group=1, stages=1, resident=4)  # 32 registers a thread
    use(monkeypatch, CompileUnit(skinny.SOURCE, (replace(skinny.VARIANTS[0], ring=crowded).expression,)))
    result = cli("build", "--arch", "sm_90a")
    assert result.exit_code == 1, result.output
    assert "spills" in result.stderr


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(kernel_catalog, "find_spec", lambda module: None)
    result = cli("list", "--arch", "sm_90a")
    assert result.exit_code == 1
    assert "pip install 'slipstream-serve[cuda]'" in result.stderr
