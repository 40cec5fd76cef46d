"""What a server holds at one moment: requests, pages, resident memory of its processes, device memory."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.slipstream.v1.control_pb2 import GetStatusRequest, GetStatusResponse

_QUIET_S = 30.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Holdings:
    """Of all workers together. Memory in MiB; None where this machine cannot tell."""

    running: int
    waiting: int
    paused: int
    pages: int
    pages_in_use: int
    """Neither free nor holding a cached prefix that nobody uses."""
    restarts: int
    rss_mib: float | None
    device_mib: float | None

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting or self.paused or self.pages_in_use)


async def holdings(stub: Any, metadata: Any) -> Holdings:
    """As they are now."""
    return _read(await stub.GetStatus(GetStatusRequest(), metadata=metadata))


async def when_idle(stub: Any, metadata: Any) -> Holdings:
    """As they are once nothing runs or half a minute has passed; memory is measured then."""
    deadline = time.monotonic() + _QUIET_S
    while not (now := await holdings(stub, metadata)).is_idle and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    return now


def _read(status: GetStatusResponse) -> Holdings:
    workers = status.workers
    return Holdings(
        running=sum(worker.running for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
        paused=sum(worker.paused for worker in workers),
        pages=sum(worker.pages for worker in workers),
        pages_in_use=sum(worker.pages - worker.pages_free - worker.pages_cached for worker in workers),
        restarts=sum(worker.restarts for worker in workers),
        rss_mib=_rss_mib(workers[0].pid) if workers else None,
        device_mib=device_mib(),
    )


def _rss_mib(worker: int) -> float | None:
    """Of the main process, which is the worker's parent, and all its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "status").read_text()
        except OSError:  # it has ended meanwhile
            continue
        fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        rss = int(fields.get("VmRSS", "0 kB").split()[0])
        parents[int(folder.name)] = (int(fields["PPid"]), rss)
    if worker not in parents:
        return None
    tree = {parents[worker][0]}
    while more := {pid for pid, (parent, _) in parents.items() if parent in tree} - tree:
        tree |= more
    return round(sum(parents[pid][1] for pid in tree if pid in parents) / 1024, 1)


def device_mib() -> float | None:
    """Memory in use on all GPUs that nvidia-smi shows."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    figures = [line.strip() for line in done.stdout.splitlines()]
    if done.returncode or not figures or not all(figure.isdigit() for figure in figures):
        return None
    return float(sum(map(int, figures)))
