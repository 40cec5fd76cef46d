"""What launch shapes depend on: a device's multiprocessors and memory limits. Knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass

from cuda.bindings import driver

from kernels.compiler import architecture_for
from kernels.errors import KernelError


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Figures of one device."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_bytes_per_block: int
    """Most dynamic shared memory that a block can ask for."""
    l2_bytes: int

    @property
    def arch(self) -> str:
        """The compile target, such as "sm_90a"."""
        return architecture_for(*self.compute_capability)

    def expect_shared(self, kernel: str, size: int) -> None:
        """Raises ValueError unless a block can have so many bytes of dynamic shared memory."""
        if size > self.shared_bytes_per_block:
            most = self.shared_bytes_per_block
            raise ValueError(f"{kernel}: {size} B of shared memory for a block; the device has {most}")


_Attribute = driver.CUdevice_attribute
_ATTRIBUTES = (
    _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    _Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    _Attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    _Attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
)


def query_limits(device: int) -> DeviceLimits:
    """Asks the driver. device: a CUdevice ordinal; cuInit must have run. Raises KernelError."""
    values = []
    for attribute in _ATTRIBUTES:
        status, value = driver.cuDeviceGetAttribute(attribute, device)
        if int(status) != 0:
            raise KernelError(f"device {device} does not tell {attribute.name}: {status.name}")
        values.append(int(value))
    return DeviceLimits((values[0], values[1]), *values[2:])
