"""Makes the Python stubs beside the .proto files: python scripts/generate_protos.py [--out FOLDER].

protoc names modules after the .proto path (slipstream.v1.…); inside this repository the stubs live in
the package protos, so their imports of one another are rewritten to protos.slipstream.v1.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> list[Path]:
    """Writes the stubs under `out` and returns their paths. Raises RuntimeError if protoc fails."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; its message stands above")
    stubs = sorted(path for path in out.rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi"))
    for path in stubs:
        text = path.read_text()
        text = re.sub(r"^from slipstream\.v1 import", "from protos.slipstream.v1 import", text, flags=re.M)
        path.write_text(text)
    for folder in {path.parent for path in stubs}:
        while folder != out:
            (folder / "__init__.py").touch()
            folder = folder.parent
    return stubs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PROTOS)
    for path in generate(parser.parse_args().out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
