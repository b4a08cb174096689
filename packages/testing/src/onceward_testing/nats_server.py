"""A cluster of real NATS servers for tests of replicas and elections.

::

    with RealNatsCluster() as cluster:
        url = cluster.url()
        leader = cluster.leader("ONCEWARD_JOBS")
        leader.kill()  # an election takes up to ten seconds
        leader.start()
        cluster.isolate(leader)  # no other node reaches it, but clients do
        cluster.heal_network()
"""

import json
import time
from collections.abc import Callable
from itertools import permutations
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from onceward_testing.network_link import NetworkLink
from onceward_testing.servers import RealNats

__all__ = ["RealNatsCluster"]

T = TypeVar("T")

# An election alone may take nine seconds, and the machine may be busy.
_ELECTION_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
_PROBE: Final = "onceward-probe"


class RealNatsCluster:
    """Nodes on loopback, each with its own ports and files."""

    def __init__(self, size: int = 3) -> None:
        self.nodes = tuple(RealNats() for _ in range(size))
        # By the node that connects and the one it connects to.
        self._links = {
            (source, target): NetworkLink(target.route_port)
            for source, target in permutations(self.nodes, 2)
        }
        for node in self.nodes:
            ports = [link.port for (source, _), link in self._links.items() if source is node]
            node.join("onceward", ports)

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
        """Return the URLs of all nodes, separated by commas."""
        return ",".join(node.url() for node in self.nodes)

    @property
    def running(self) -> tuple[RealNats, ...]:
        """The nodes that are running."""
        return tuple(node for node in self.nodes if node.pid is not None)

    def start(self) -> None:
        """Start every stopped node, and wait until streams can be created."""
        for link in self._links.values():
            link.start()
        for node in self.nodes:
            node.start()
        self._until(self._can_create_streams, "the nodes have not elected a leader")

    def leader(self, stream: str) -> RealNats:
        """Return the leader of a stream; waits for an election."""
        return self._until(lambda: self._leader(stream), f"{stream} has no leader")

    def current_leader(self, stream: str) -> RealNats | None:
        """Return the leader of a stream, or None if there is none at the moment."""
        return self._leader(stream)

    def isolate(self, node: RealNats) -> None:
        """Let nothing pass between this node and the others; clients still reach all."""
        for ends, link in self._links.items():
            if node in ends:
                link.cut()

    def heal_network(self) -> None:
        """Connect all nodes again."""
        for link in self._links.values():
            link.heal()

    def restore(self) -> None:
        """Let all nodes continue, connect them, and start those that are stopped."""
        for node in self.nodes:
            node.thaw()
        self.heal_network()
        self.start()

    def close(self) -> None:
        """Kill all nodes and remove their files. Idempotent."""
        for node in self.nodes:
            node.close()
        for link in self._links.values():
            link.close()

    def _can_create_streams(self) -> bool:
        """Create a stream: a leader alone is not enough, all nodes must be connected."""
        config = {"name": _PROBE, "subjects": [_PROBE], "num_replicas": len(self.nodes)}
        made = self._request(f"$JS.API.STREAM.CREATE.{_PROBE}", json.dumps(config).encode())
        if made is None or "error" in made:
            return False
        deleted = self._request(f"$JS.API.STREAM.DELETE.{_PROBE}")
        return deleted is not None and "error" not in deleted

    def _leader(self, stream: str) -> RealNats | None:
        response = self._request(f"$JS.API.STREAM.INFO.{stream}")
        name = (response or {}).get("cluster", {}).get("leader")
        return next((node for node in self.running if node.server_name == name), None)

    def _request(self, subject: str, body: bytes = b"") -> Any:
        """Send a request to the first node that responds."""
        for node in self.running:
            try:
                return node.request(subject, body)
            except OSError:
                continue
        return None

    def _until(self, check: Callable[[], T | None], error: str) -> T:
        deadline = time.monotonic() + _ELECTION_SECONDS
        while not (found := check()):
            if time.monotonic() > deadline:
                logs = "\n\n".join(node.log_tail() for node in self.nodes)
                raise RuntimeError(f"{error}; their logs:\n{logs}")
            time.sleep(_POLL_SECONDS)
        return found
