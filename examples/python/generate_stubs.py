"""Makes the client's stubs from the .proto files: python generate_stubs.py

They land in the folder slipstream/ beside this file, as the modules slipstream.v1.*_pb2 and *_pb2_grpc.
"""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protos", type=Path, default=HERE.parent.parent / "protos")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    return int(
        protoc.main(
            [
                "protoc",
                f"-I{options.protos}",
                f"-I{files('grpc_tools') / '_proto'}",
                f"--python_out={options.out}",
                f"--pyi_out={options.out}",
                f"--grpc_python_out={options.out}",
                *(str(path) for path in sorted(options.protos.rglob("*.proto"))),
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
