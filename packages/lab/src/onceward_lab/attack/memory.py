"""The resident memory of a process, read from ``/proc``."""

from pathlib import Path

__all__ = ["rss_bytes"]


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process and of all its descendants (Linux only)."""
    pids, total = [pid], 0
    while pids:
        one = Path("/proc") / str(pids.pop())
        try:
            for line in (one / "status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) * 1024
            for task in (one / "task").iterdir():
                pids += [int(child) for child in (task / "children").read_text("ascii").split()]
        except FileNotFoundError:  # it has ended meanwhile
            continue
    return total
