"""Run in a process of its own: captures cached plans as the first thing done with them, then compares a
replay with an eager call. Reads [[rows, n, k], …] from standard input, prints [bool, …]. Argument: the cache
folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from cuda.bindings import driver
from cuda_support import Memory, opened_device

from engine.cuda.device import check
from engine.cuda.gemm import WORKSPACE_BYTES, GemmKey, GemmPlanner
from kernels.tensor import DType


def main() -> None:
    rng = np.random.default_rng(1)
    with opened_device() as device:
        planner = GemmPlanner(device, cache_folder=Path(sys.argv[1]))
        memory = Memory(device)
        stream = device.stream()
        scratch = memory.empty((WORKSPACE_BYTES,), DType.U8)
        agree = []
        for rows, n, k in json.load(sys.stdin):
            plan = planner.plan(GemmKey(rows, n, k))
            assert plan.is_tuned
            x, w = (
                memory.upload(rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16))
                for shape in ((rows, k), (n, k))
            )
            y = memory.empty((rows, n), DType.BF16)
            gemm = plan.bind(x=x, w=w, y=y, workspace=scratch)
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            check(driver.cuStreamBeginCapture(stream.handle, mode), "capture")
            gemm(stream.handle)
            graph = check(driver.cuStreamEndCapture(stream.handle), "capture")
            executable = check(driver.cuGraphInstantiate(graph, 0), "instantiate")
            check(driver.cuGraphLaunch(executable, stream.handle), "launch")
            stream.synchronize()
            replayed = memory.download(y).view(np.uint16)
            memory.poison(y)
            gemm(stream.handle)
            agree.append(bool((memory.download(y).view(np.uint16) == replayed).all()))
        memory.release()
        stream.close()
        planner.close()
    print(json.dumps(agree))


if __name__ == "__main__":
    main()
