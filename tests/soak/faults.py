"""A disk that fills up, hangs, breaks and recovers, simulated at the tier's own calls in a worker's process."""

import errno
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

from kvmosaic.store import DiskTier

DiskFault = Literal["full", "hung", "broken"]
CALLS = ("size", "get", "put", "delete", "scan", "holds", "get_all", "delete_all")


class _Disk:
    """Current state of this process's disk."""

    fault: DiskFault | None = None
    works = threading.Event()
    calls_hit = 0


_Disk.works.set()


def install_disk_faults(worker: Any = None) -> None:
    """Make every call of a disk tier check the state of the disk first."""
    for name in CALLS:
        if name in vars(DiskTier):
            setattr(DiskTier, name, _asking(name, vars(DiskTier)[name]))


def start_disk_fault(worker: Any, fault: DiskFault, seconds: float) -> None:
    """Start a fault for some seconds. Another thread ends it, because this one may hang."""
    _Disk.fault = fault
    if fault == "hung":
        _Disk.works.clear()
    threading.Timer(seconds, end_disk_fault).start()


def end_disk_fault(worker: Any = None) -> int:
    """Let the disk work again. Returns the number of calls that met the fault since the last time."""
    _Disk.fault = None
    _Disk.works.set()
    hit, _Disk.calls_hit = _Disk.calls_hit, 0
    return hit


def _asking(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def asking(*args: Any) -> Any:
        fault = _Disk.fault
        _Disk.calls_hit += fault is not None
        if fault == "hung":
            _Disk.works.wait()
        elif fault == "broken" or (fault == "full" and name == "put"):
            number = errno.ENOSPC if fault == "full" else errno.EIO
            raise OSError(number, os.strerror(number))
        return call(*args)

    return asking
