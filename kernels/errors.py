"""What can go wrong between a kernel's source and its launch. Knows no kernel in particular."""

from __future__ import annotations


class KernelError(Exception):
    """A kernel could not be compiled, loaded or launched."""


class KernelCompileError(KernelError):
    """NVRTC refused a source. Carries the file, the instantiations asked for and the compiler's log."""

    def __init__(self, source: str, arch: str, expressions: tuple[str, ...], log: str) -> None:
        self.source = source
        self.arch = arch
        self.expressions = expressions
        self.log = log
        names = ", ".join(expressions)
        super().__init__(f"kernels/{source} does not compile for {arch} ({names}):\n{log.strip()}")


class KernelLaunchError(KernelError):
    """The driver refused a launch. Carries the kernel's name, its launch shape and the driver's reason."""

    def __init__(self, kernel: str, shape: str, reason: str) -> None:
        self.kernel = kernel
        self.shape = shape
        self.reason = reason
        super().__init__(f"launch of {kernel} ({shape}) failed: {reason}")
