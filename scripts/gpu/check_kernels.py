"""Everything that can be said of the kernels on the GPU present: tests, memory and race checks, figures.

    PYTHONPATH=. python scripts/gpu/check_kernels.py --out FOLDER

Writes a log per step and the benchmark's files into FOLDER, prints a summary, and exits 1 if a step failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted((ROOT / "tests" / "gpu").glob("test_kernel_*.py"))
PYTEST = [sys.executable, "-m", "pytest", f"--confcutdir={ROOT / 'tests' / 'gpu'}", "-p", "no:cacheprovider"]
SANITIZED = (
    "(test_decode and 128 and 7 and 100) or test_decode_scale or (test_prefill_ragged and 64 and heads2) "
    "or (test_step and 100-7-128) or (test_clusters and (256-64-4 or 64-64-8)) "
    "or (test_prefill_e4m3 and 64 and heads1) or (test_prefill_variants and 64-4-2 and 100) "
    "or test_slot_control or (test_sampling and 5001) or (test_logprobs and 4096) or test_bad_logits "
    "or (rope and heads0 and 17) or (rope and heads4 and 300) or test_embed or (test_add_rms and 576) "
    "or quantises or (gated and (264 or 12288-silu)) or (raw_sums and 576) or (rows_are_quantised and 576) "
    "or test_unit_vectors or (few_rows and swiglu and normed) "
    "or (stream_of_one_row and (48-96 or 32-14336)) or (stream_of_rows and (48-96 or 304-4096)) "
    "or (q4 and 64-160) or (q4_gemm_variants and -2-)"
)
"""A case of every kernel: the sanitizer runs each some twenty times slower."""


def steps(out: Path) -> dict[str, list[str]]:
    """Command lines by name."""
    tests = [*PYTEST, *map(str, TESTS)]
    bench = [sys.executable, str(ROOT / "scripts" / "gpu" / "bench_kernels.py"), "--out", str(out)]
    commands = {"tests": tests}
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("memcheck", "racecheck"):
        commands[tool] = [sanitizer, "--tool", tool, "--error-exitcode", "9", *tests, "-k", SANITIZED]
    return {**commands, "bench": bench}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    paths = [
        str(ROOT),
        str(ROOT / "tests" / "gpu"),
        str(ROOT / "scripts" / "gpu"),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    failed = []
    for name, command in steps(options.out).items():
        if options.only and name not in options.only:
            continue
        log = options.out / f"{name}.log"
        with log.open("w") as file:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False)
        tail = (
            log.read_text().splitlines()[-3:] if done.returncode == 0 else log.read_text().splitlines()[-40:]
        )
        print(
            f"{name}: {'ok' if done.returncode == 0 else f'exit {done.returncode}'}",
            *tail,
            sep="\n  ",
            flush=True,
        )
        if done.returncode != 0:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
