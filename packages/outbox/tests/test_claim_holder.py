"""Names of processes that hold claims: which of them have certainly ended."""

import os
import subprocess
import sys

from onceward_outbox.claims import claim_holder, has_ended


def of_child() -> tuple[str, "subprocess.Popen[str]"]:
    code = (
        "from onceward_outbox.claims import claim_holder\n"
        "print(claim_holder(), flush=True)\n"
        "input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child.stdout.readline().strip(), child


def test_process_has_ended_only_after_it_was_killed() -> None:
    name, child = of_child()
    with child:
        assert not has_ended(name)
        child.kill()
        child.wait()
        assert has_ended(name)


def test_pid_that_another_process_has_now_counts_as_ended() -> None:
    pid, started, *context = claim_holder().split("/")
    assert pid == str(os.getpid())
    assert not has_ended(claim_holder())
    assert has_ended("/".join([pid, str(int(started) - 1), *context]))


def test_process_of_another_boot_namespace_or_version_is_not_judged() -> None:
    _, started, boot, spaces = claim_holder().split("/")
    unused = 2**22 + 1  # above the highest pid
    assert has_ended(f"{unused}/{started}/{boot}/{spaces}")
    assert not has_ended(f"{unused}/{started}/another/{spaces}")
    assert not has_ended(f"{unused}/{started}/{boot}/pid:[1]+time:[1]")
    assert not has_ended(f"{unused}")
    assert not has_ended("")
