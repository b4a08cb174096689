"""Whatever becomes of the owner, a nursery leaves neither processes nor files behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast_lab.fork_client import Nursery

OWNER = """
import asyncio, sys
from pathlib import Path
from holdfast_lab.fork_client import Nursery

async def own():
    async with Nursery(Path(sys.argv[1])) as nursery:
        child = await nursery.start("sleeper", [], target="signal:pause")
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


def test_when_its_owner_is_killed_children_and_files_go_too(tmp_path: Path) -> None:
    directory = tmp_path / "nursery"
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
        assert time.monotonic() < deadline, "something was left behind"
        time.sleep(0.01)


async def test_how_children_end_is_told_and_their_words_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "nursery"
    directory.mkdir()
    async with asyncio.timeout(60), Nursery(directory) as nursery:
        speaker = await nursery.start("speaker", ["canonical", "missing.json"])
        sleepers = [
            await nursery.start(f"sleeper-{number}", [], target="signal:pause")
            for number in range(3)
        ]
        await speaker.ended.wait()
        assert speaker.code == 2
        assert speaker.tail().startswith("holdfast: ")
        nursery.signal(sleepers[0], signal.SIGSTOP)
        await nursery.kill(sleepers[0])
        assert sleepers[0].code == -signal.SIGKILL
        assert await nursery.stop(sleepers[1]) == -signal.SIGTERM
    assert not sleepers[2].is_alive
    assert not directory.exists()
