"""A disk that fills up, hangs, breaks and recovers, simulated at the tier's own calls in a worker's process.

A step must never wait for the disk. So its thread makes no call of the tier, and no other thread has a lock of the
store during one.
"""

import errno
import os
import threading
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Literal

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvmosaic.store import DiskTier

DiskFault = Literal["full", "hung", "broken"]
CALLS = ("size", "get", "put", "delete", "scan", "holds", "get_all", "delete_all")


class _Disk:
    """Current state of this process's disk."""

    fault: DiskFault | None = None
    works = threading.Event()
    calls_hit = 0
    step_thread = 0
    locks: tuple[Any, ...] = ()
    """Locks of the store that steps take."""
    waited_for: ClassVar[set[str]] = set()
    """Calls that a step waits for, or may wait for."""


_Disk.works.set()


def install_disk_faults(worker: Any = None) -> None:
    """Make every call of a disk tier check the state of the disk first. Called in the thread of the steps."""
    stack = get_kv_transfer_group().worker.cache.store._stack
    _Disk.step_thread = threading.get_ident()
    _Disk.locks = (stack.lock, stack.writer._changed)
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


def waited_for(worker: Any = None) -> list[str]:
    """Calls of the disk so far that a step waited for, or that were made under a lock that steps take."""
    return sorted(_Disk.waited_for)


def _asking(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def asking(*args: Any) -> Any:
        is_step = threading.get_ident() == _Disk.step_thread
        if is_step or any(lock._is_owned() for lock in _Disk.locks):
            callers = " < ".join(frame.name for frame in reversed(traceback.extract_stack(limit=7)[:-1]))
            _Disk.waited_for.add(f"disk call {name} {'in a step' if is_step else 'under a lock'}: {callers}")
        fault = _Disk.fault
        _Disk.calls_hit += fault is not None
        if fault == "hung":
            _Disk.works.wait()
        elif fault == "broken" or (fault == "full" and name == "put"):
            number = errno.ENOSPC if fault == "full" else errno.EIO
            raise OSError(number, os.strerror(number))
        return call(*args)

    return asking
