"""The state of this node's GPUs, as the driver's management library reports it; CUDA isn't touched.

Source: NVML API reference, nvmlReturn_t, nvmlClocksThrottleReasons.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_NO_DRIVER = 9
"""NVML_ERROR_DRIVER_NOT_LOADED."""
SLOWDOWNS = {0x08: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
"""Reasons for which the hardware itself lowers the clocks. Source: nvml.h, nvmlClocksThrottleReason*."""
_UNCORRECTED, _SINCE_RESET, _CORE_SENSOR, _SM_CLOCK = 1, 0, 0, 1
"""NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM."""


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


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

    def _gpu(self, index: int) -> GpuState:
        handle = ctypes.c_void_p()
        code = self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        if code:
            return GpuState(index=index, error=self._message(code))
        name, memory = ctypes.create_string_buffer(_TEXT_BYTES), _Memory()
        self._call("nvmlDeviceGetName", handle, name, _TEXT_BYTES)
        # A GPU that fell off the bus may still give its handle and name.
        code = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        if code:
            return GpuState(index=index, error=self._message(code), name=self._text(name))
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
        )

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
