"""Two processes refuse the same key at the same time: the second replays the first."""

from pathlib import Path

from packages.onceward.tests.support.harness import Lab, open_lab


class CommitInBetween:
    """Makes another process commit a response just before this one commits."""

    def __init__(self) -> None:
        self.other: Lab | None = None

    async def reach(self, point: str) -> None:
        if point == "before_commit" and self.other is not None:
            other, self.other = self.other, None
            self.first = await other.send(do="422", headers={"X-Request-ID": "first"})


async def test_the_second_error_response_is_the_recorded_one(tmp_path: Path) -> None:
    database, faults = f"sqlite:///{tmp_path}/lab.db", CommitInBetween()
    async with open_lab(database, faults=faults) as one, open_lab(database) as two:
        faults.other = two
        second = await one.send(do="422", headers={"X-Request-ID": "second"})
        assert second.headers["idempotency-replayed"] == "true"
        assert second.headers["x-original-request-id"] == "first"
        assert (second.status_code, second.content) == (422, faults.first.content)
