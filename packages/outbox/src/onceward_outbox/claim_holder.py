"""The process that holds a claim, as the file names it, and whether it has certainly ended.

On Linux the name has the pid, when that process was started, and the boot and namespaces in which
these numbers hold. Elsewhere it is the pid alone, and a claim ends with its lease.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import Final

__all__ = ["claim_holder", "has_ended"]

_PROC: Final = Path("/proc")
_FIELDS: Final = 4


def claim_holder() -> str:
    """Return the name of this process as the holder of claims."""
    return _holder(os.getpid())


def has_ended(holder: str) -> bool:
    """Return whether the process is known to have ended. False if it is not certain."""
    fields, own = holder.split("/"), claim_holder().split("/")
    if len(fields) != _FIELDS or fields[2:] != own[2:] or not fields[0].isdigit():
        return False
    pid, started = fields[:2]
    try:
        # Not by /proc, which may hide the processes of other users.
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it lives, and belongs to another user
        pass
    found = _started(int(pid))
    return found is not None and found != started


@lru_cache(maxsize=1)
def _holder(pid: int) -> str:
    started, context = _started(pid), _context()
    return f"{pid}" if started is None or context is None else f"{pid}/{started}/{context}"


def _context() -> str | None:
    """Return where pids and start times mean the same: the boot, and the namespaces."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # In containers that share a file, a pid is that of another process, or of none.
        pids = (_PROC / "self/ns/pid").readlink()
    except (OSError, ValueError):
        return None
    try:
        times = str((_PROC / "self/ns/time").readlink())
    except OSError:  # before Linux 5.6
        times = "-"
    return f"{boot}/{pids}+{times}"


def _started(pid: int) -> str | None:
    """Return when a process was started, in ticks since the boot; None if it is not known."""
    try:
        before, _, after = (_PROC / f"{pid}/stat").read_text(encoding="latin-1").rpartition(")")
    except OSError:
        return None
    # The name of the program is in parentheses, and may contain anything. The start is field 22.
    values = after.split()
    return values[19] if before.startswith(f"{pid} (") and len(values) > 19 else None  # noqa: PLR2004
