"""What the pages for people name must be there: files, links, flags and commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from service.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/*.md")),
]
SOURCES = (".py", ".proto", ".cu", ".cuh", ".sh")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchor(heading: str) -> str:
    """As the usual renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, section = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} does not exist"
        if section:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert section in map(anchor, headings), f"{target}: no such heading"


@every_page
def test_files_named_in_passing_exist(page: Path) -> None:
    """`worker/loop.py` from the root; `chunks.py` anywhere."""
    names = {path.name for suffix in SOURCES for path in ROOT.glob(f"*/**/*{suffix}")}
    for name in re.findall(r"`([\w./-]+)`", page.read_text(encoding="utf-8")):
        if name.endswith(SOURCES) and not name.startswith("."):
            is_there = (ROOT / name).is_file() if "/" in name else name in names
            assert is_there, f"{name} does not exist"


@every_page
def test_commands_and_their_flags_exist(page: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(r"\bslipstream ([a-z]+\b[^`\n#]*)", page.read_text(encoding="utf-8")):
        name, *words = line.split()
        if name in commands:
            command = commands[name]
            while words and words[0] in getattr(command, "commands", {}):
                name, command = f"{name} {words[0]}", command.commands[words.pop(0)]
            options = command.params
            known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
            for flag in (word.split("=")[0] for word in words if word.startswith("--")):
                assert flag in known | {"--help"}, f"slipstream {name} has no {flag}"
