"""The fork server leaves neither processes nor files behind, even if its owner is killed."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from onceward_lab.fork_client import AsyncForkServer

OWNER = """
import asyncio, sys
from pathlib import Path
from onceward_lab.fork_client import AsyncForkServer

async def own():
    async with AsyncForkServer(Path(sys.argv[1])) as processes:
        child = await processes.start("sleeper", [], target="signal:pause")
        while not child.pid:
            await asyncio.sleep(0.01)
        print(child.pid, flush=True)
        await child.ended.wait()

asyncio.run(own())
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_killed_owner_leaves_no_children_and_no_files(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        assert select.select([owner.stdout], [], [], 60)[0]
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 20
    while is_alive(pid) or directory.exists():
        assert time.monotonic() < deadline, "the fork server left a process or its directory behind"
        time.sleep(0.01)


async def test_exit_codes_are_reported_and_output_is_kept(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    async with asyncio.timeout(60), AsyncForkServer(directory) as processes:
        cli = await processes.start("cli", ["canonical", "missing.json"])
        sleepers = [
            await processes.start(f"sleeper-{number}", [], target="signal:pause")
            for number in range(3)
        ]
        await cli.ended.wait()
        assert cli.code == 2
        assert cli.tail().startswith("onceward: ")
        processes.signal(sleepers[0], signal.SIGSTOP)
        await processes.kill(sleepers[0])
        assert sleepers[0].code == -signal.SIGKILL
        assert await processes.stop(sleepers[1]) == -signal.SIGTERM
    assert not sleepers[2].is_alive
    assert not directory.exists()
