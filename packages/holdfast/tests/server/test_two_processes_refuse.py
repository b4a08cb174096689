"""Two processes refuse the same key at once: whoever is second tells the first one's answer."""

from pathlib import Path

from packages.holdfast.tests.support.harness import Lab, open_lab


class AtTheCommit:
    """Lets another process answer just before this one commits."""

    def __init__(self) -> None:
        self.other: Lab | None = None

    async def reach(self, point: str) -> None:
        if point == "before_commit" and self.other is not None:
            other, self.other = self.other, None
            self.first = await other.send(do="422", headers={"X-Request-ID": "first"})


async def test_a_refusal_that_comes_second_is_the_recorded_one(tmp_path: Path) -> None:
    database, faults = f"sqlite:///{tmp_path}/lab.db", AtTheCommit()
    async with open_lab(database, faults=faults) as one, open_lab(database) as two:
        faults.other = two
        second = await one.send(do="422", headers={"X-Request-ID": "second"})
        assert second.headers["idempotency-replayed"] == "true"
        assert second.headers["x-original-request-id"] == "first"
        assert (second.status_code, second.content) == (422, faults.first.content)
