"""The state of this node's GPUs, as the driver's management library reports it; CUDA isn't touched.

Source: NVML API reference, nvmlReturn_t, nvmlClocksThrottleReasons.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_MOST_XIDS = 64
_NO_DRIVER = 9
"""NVML_ERROR_DRIVER_NOT_LOADED."""
SLOWDOWNS = {0x08: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
"""Reasons for which the hardware itself lowers the clocks. Source: nvml.h, nvmlClocksThrottleReason*."""
_UNCORRECTED, _SINCE_RESET, _CORE_SENSOR, _SM_CLOCK = 1, 0, 0, 1
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM."""


_XID_EVENT = ctypes.c_ulonglong(0x8)
"""nvmlEventTypeXidCriticalError."""
FAILING_XIDS = {
    48: "a memory error that ECC can't correct",
    64: "a row of memory that can't be remapped",
    74: "an NVLink error",
    79: "the GPU fell off the bus",
    92: "many memory errors that ECC corrected",
    95: "an uncontained memory error",
    119: "its system processor doesn't answer",
    120: "its system processor failed",
    140: "an unrecovered memory error",
}
"""Errors that point at the hardware. Others (13, 31, 43, 45 ...) are often a program's. Source: NVIDIA, XID Errors."""


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _EventData(ctypes.Structure):
    """Source: nvml.h, nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p), ("type", ctypes.c_ulonglong), ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """One GPU's state; a figure that the GPU doesn't report is None."""

    index: int
    """Number of the GPU."""
    error: str
    """Why the driver can't reach it; empty when it can."""
    name: str = ""
    """Its product name."""
    used_bytes: int | None = None
    """Memory in use by any process."""
    total_bytes: int | None = None
    """Its memory."""
    uncorrected_errors: int | None = None
    """Memory errors since the last reset that ECC couldn't correct."""
    celsius: int | None = None
    """Temperature of the core."""
    utilisation: float | None = None
    """Share of the last moments in which a kernel ran."""
    clock_hz: float | None = None
    """Clock of the multiprocessors."""
    watts: float | None = None
    """Power that it draws."""
    joules: float | None = None
    """Energy since the driver was loaded."""
    slowdowns: tuple[str, ...] = ()
    """Why the hardware lowers its clocks now; see `SLOWDOWNS`."""
    uuid: str = ""
    """Its identity, as ``CUDA_VISIBLE_DEVICES`` may name it."""
    remap_failed: bool = False
    """Whether a faulty row of its memory couldn't be replaced."""


class Nvml:
    """The management library, loaded and initialised.

    Raises:
        OSError: when this machine has no such library, or no driver.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        code = self._call("nvmlInit_v2")
        if code == _NO_DRIVER:
            raise OSError("the driver isn't loaded")
        self._indices: dict[int, int] = {}
        self._xid_events: ctypes.c_void_p | None = None
        self.error = self._message(code)
        """Why the library doesn't work although there is a driver; empty when it does."""

    def driver(self) -> str:
        """Returns the driver's version; empty when unknown."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        return self._text(text) if self._call("nvmlSystemGetDriverVersion", text, _TEXT_BYTES) == 0 else ""

    def gpus(self) -> list[GpuState]:
        """Returns the state of every GPU that the driver lists."""
        count = ctypes.c_uint()
        code = self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [] if code else [self._gpu(index) for index in range(count.value)]

    def watch_xids(self) -> None:
        """Begins to collect the driver's error reports; does nothing where it has none."""
        events = ctypes.c_void_p()
        if self._call("nvmlEventSetCreate", ctypes.byref(events)):
            return
        self._xid_events = events
        for state in self.gpus():
            handle = ctypes.c_void_p()
            if self._call("nvmlDeviceGetHandleByIndex_v2", state.index, ctypes.byref(handle)) == 0:
                self._indices[handle.value or 0] = state.index
                self._call("nvmlDeviceRegisterEvents", handle, _XID_EVENT, events)

    def take_xids(self) -> list[tuple[int, int]]:
        """Returns (index of the GPU, XID) of each error reported since the last call."""
        xids: list[tuple[int, int]] = []
        event = _EventData()
        # The limit is of a driver that reports without end.
        while self._xid_events is not None and len(xids) < _MOST_XIDS:
            if self._call("nvmlEventSetWait_v2", self._xid_events, ctypes.byref(event), 0):
                break
            if event.type == _XID_EVENT.value:
                xids.append((self._indices.get(event.device or 0, -1), int(event.data)))
        return xids

    def _gpu(self, index: int) -> GpuState:
        handle = ctypes.c_void_p()
        code = self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        if code:
            return GpuState(index=index, error=self._message(code))
        name, uuid, memory = (*(ctypes.create_string_buffer(_TEXT_BYTES) for _ in range(2)), _Memory())
        self._call("nvmlDeviceGetName", handle, name, _TEXT_BYTES)
        self._call("nvmlDeviceGetUUID", handle, uuid, _TEXT_BYTES)
        # A GPU that fell off the bus may still give its handle and name.
        code = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        if code:
            return GpuState(index=index, error=self._message(code), name=self._text(name), uuid=self._text(uuid))
        reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        return GpuState(
            index=index,
            error="",
            name=self._text(name),
            used_bytes=memory.used,
            total_bytes=memory.total,
            uncorrected_errors=self._number("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_RESET),
            celsius=self._number("nvmlDeviceGetTemperature", handle, _CORE_SENSOR),
            utilisation=self._utilisation(handle),
            clock_hz=_scaled(self._number("nvmlDeviceGetClockInfo", handle, _SM_CLOCK), 1e6),
            watts=_scaled(self._number("nvmlDeviceGetPowerUsage", handle), 1e-3),
            joules=_scaled(self._number("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
            slowdowns=tuple(text for bit, text in SLOWDOWNS.items() if reasons & bit),
            uuid=self._text(uuid),
            remap_failed=self._remap_failed(handle),
        )

    def _remap_failed(self, handle: ctypes.c_void_p) -> bool:
        corrected, uncorrected, pending, failed = (ctypes.c_uint() for _ in range(4))
        rows = [ctypes.byref(number) for number in (corrected, uncorrected, pending, failed)]
        return self._call("nvmlDeviceGetRemappedRows", handle, *rows) == 0 and failed.value != 0

    def _utilisation(self, handle: ctypes.c_void_p) -> float | None:
        used = _Utilisation()
        code = self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(used))
        return None if code else used.gpu / 100

    def _number(self, function: str, *args: object) -> int | None:
        number = ctypes.c_ulonglong()
        return number.value if self._call(function, *args, ctypes.byref(number)) == 0 else None

    def _call(self, function: str, *args: object) -> int:
        """Returns the library's code; -1 for a function that this version doesn't have."""
        pointer = getattr(self._library, function, None)
        return int(pointer(*args)) if pointer is not None else -1

    def _message(self, code: int) -> str:
        if code == 0:
            return ""
        describe = getattr(self._library, "nvmlErrorString", None)
        if describe is None:
            return f"NVML error {code}"
        describe.restype = ctypes.c_char_p
        return f"{(describe(code) or b'').decode(errors='replace')} (NVML error {code})"

    @staticmethod
    def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
        return buffer.value.decode(errors="replace")


def _scaled(value: int | None, scale: float) -> float | None:
    return None if value is None else value * scale


def visible_gpus(gpus: Sequence[GpuState], environment: Mapping[str, str]) -> list[int] | None:
    """Returns the driver's index of each device of torch, by its number; None where that can't be known.

    CUDA numbers GPUs by speed unless ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``, which is the driver's order too where all
    GPUs are of a kind. Source: CUDA C++ programming guide, environment variables.

    Args:
        gpus: all of the node, by index.
        environment: of the process that uses them.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus if gpu.name}) <= 1
    if visible is None:
        return [gpu.index for gpu in gpus] if by_bus else None
    indices: list[int] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        if entry.isdecimal():
            if not by_bus:
                return None
            named = [gpu.index for gpu in gpus if gpu.index == int(entry)]
        else:
            named = [gpu.index for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
            if entry.startswith("MIG"):
                return None
        # CUDA reads the list up to the first entry that names no device, or more than one.
        if len(named) != 1:
            break
        indices += named
    return indices
