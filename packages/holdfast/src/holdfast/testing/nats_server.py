"""Several real NATS servers that form one cluster: replicas, and leaders that can be killed.

::

    with RealNatsCluster() as cluster:
        url = cluster.url()
        leader = cluster.leader("HOLDFAST_JOBS")
        leader.kill()  # the others elect another, which takes up to ten seconds
        leader.start()
"""

import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from holdfast.testing.servers import RealNats

__all__ = ["RealNatsCluster"]

T = TypeVar("T")

# An election alone may take nine seconds, and the machine may be busy.
_AGREES_WITHIN_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
_PROBE: Final = "holdfast-probe"


class RealNatsCluster:
    """Nodes on loopback, each with its own port and files; three of them agree by majority."""

    def __init__(self, size: int = 3) -> None:
        self.nodes = tuple(RealNats() for _ in range(size))
        for node in self.nodes:
            node.join("holdfast", (other for other in self.nodes if other is not node))

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def url(self) -> str:
        """Where a client connects: all nodes, with commas between them."""
        return ",".join(node.url() for node in self.nodes)

    @property
    def running(self) -> tuple[RealNats, ...]:
        """The nodes that are up."""
        return tuple(node for node in self.nodes if node.pid is not None)

    def start(self) -> None:
        """Start every node that is down, and wait until the cluster takes streams."""
        for node in self.nodes:
            node.start()
        self._until(self._agrees, "the nodes do not agree on a leader")

    def leader(self, stream: str) -> RealNats:
        """Return the node that leads a stream, waiting for the election if there is one."""
        return self._until(lambda: self._leader(stream), f"nobody leads {stream}")

    def close(self) -> None:
        """End all of them and remove their files. Safe to call twice."""
        for node in self.nodes:
            node.close()

    def _agrees(self) -> bool:
        """Try it: a leader alone is not enough, it also has to have met the others."""
        config = {"name": _PROBE, "subjects": [_PROBE], "num_replicas": len(self.nodes)}
        made = self._ask(f"$JS.API.STREAM.CREATE.{_PROBE}", json.dumps(config).encode())
        if made is None or "error" in made:
            return False
        gone = self._ask(f"$JS.API.STREAM.DELETE.{_PROBE}")
        return gone is not None and "error" not in gone

    def _leader(self, stream: str) -> RealNats | None:
        answer = self._ask(f"$JS.API.STREAM.INFO.{stream}")
        name = (answer or {}).get("cluster", {}).get("leader")
        return next((node for node in self.running if node.server_name == name), None)

    def _ask(self, subject: str, body: bytes = b"") -> Any:
        """Ask the first node that answers."""
        for node in self.running:
            try:
                return node.ask(subject, body)
            except OSError:
                continue
        return None

    def _until(self, look: Callable[[], T | None], trouble: str) -> T:
        deadline = time.monotonic() + _AGREES_WITHIN_SECONDS
        while not (found := look()):
            if time.monotonic() > deadline:
                logs = "\n\n".join(node.log_tail() for node in self.nodes)
                raise RuntimeError(f"{trouble}; their logs:\n{logs}")
            time.sleep(_POLL_SECONDS)
        return found
