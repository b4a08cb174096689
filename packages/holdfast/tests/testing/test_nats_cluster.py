"""The cluster of the test kit: three nodes that agree, and a server that can be robbed."""

import json
import time
from contextlib import suppress

import pytest

from holdfast.testing.nats_server import RealNatsCluster
from holdfast.testing.servers import RealNats

pytestmark = pytest.mark.xdist_group("nats-cluster")


def test_three_nodes_keep_a_stream_and_know_its_leader():
    config = {"name": "kept", "subjects": ["kept.>"], "num_replicas": 3, "storage": "file"}
    with RealNatsCluster() as cluster:
        assert len(cluster.running) == 3
        assert cluster.url().count("nats://127.0.0.1:") == 3
        made = cluster.nodes[0].request("$JS.API.STREAM.CREATE.kept", json.dumps(config).encode())
        assert made["config"]["num_replicas"] == 3
        leader = cluster.leader("kept")
        assert leader.request("kept.one", b"1")["seq"] == 1
        follower = next(node for node in cluster.nodes if node is not leader)
        follower.kill()
        assert follower not in cluster.running
        assert cluster.leader("kept") is leader
        assert leader.request("kept.two", b"2")["seq"] == 2  # two of three are enough
        cluster.start()
        assert cluster.running == cluster.nodes
        directories = [node.directory for node in cluster.nodes]
    assert not any(directory.exists() for directory in directories)
    cluster.close()


@pytest.mark.long
def test_an_isolated_node_takes_no_messages_until_the_network_is_healed():
    config = {"name": "split", "subjects": ["split.>"], "num_replicas": 3, "storage": "file"}
    with RealNatsCluster() as cluster:
        made = cluster.nodes[0].request("$JS.API.STREAM.CREATE.split", json.dumps(config).encode())
        assert made["config"]["num_replicas"] == 3
        leader = cluster.leader("split")
        cluster.isolate(leader)
        others = [node for node in cluster.nodes if node is not leader]
        # The other two elect one of themselves; the old leader is not told.
        new = others_leader(others, "split")
        assert new in {node.server_name for node in others}
        assert others[0].request("split.one", b"1")["seq"] == 1
        with pytest.raises(OSError):
            leader.request("split.two", b"2")
        cluster.heal_network()
        deadline = time.monotonic() + 60
        while current_replicas(others[0], "split") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def others_leader(nodes, stream: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        with suppress(OSError):
            leader = nodes[0].request(f"$JS.API.STREAM.INFO.{stream}")["cluster"]["leader"]
            if leader in {node.server_name for node in nodes}:
                return str(leader)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def current_replicas(node: RealNats, stream: str) -> int:
    """How many followers have all messages."""
    with suppress(OSError):
        cluster = node.request(f"$JS.API.STREAM.INFO.{stream}")["cluster"]
        return sum(replica["current"] for replica in cluster["replicas"])
    return 0


def test_cluster_that_cannot_start_leaves_no_files(monkeypatch):
    started: list[RealNats] = []
    start = RealNats.start

    def fails_at_the_second(node: RealNats) -> None:
        if started:
            raise RuntimeError("no more")
        start(node)
        started.append(node)

    monkeypatch.setattr(RealNats, "start", fails_at_the_second)
    with pytest.raises(RuntimeError, match="no more"), RealNatsCluster():
        pytest.fail("it started")
    assert started[0].pid is None
    with pytest.raises(RuntimeError, match="no directory"):
        _ = started[0].directory


def test_files_of_a_running_server_cannot_be_deleted():
    with RealNats() as server:
        with pytest.raises(RuntimeError, match="stop or kill it first"):
            server.lose_files()
        config = b'{"name": "gone", "subjects": ["gone.>"], "storage": "file"}'
        assert "error" not in server.request("$JS.API.STREAM.CREATE.gone", config)
        server.kill()
        server.lose_files()
        server.start()
        assert server.request("$JS.API.STREAM.INFO.gone")["error"]["code"] == 404


def test_request_without_a_responder_is_an_error():
    with RealNats() as server, pytest.raises(ConnectionError, match="no response"):
        server.request("no.such.subject")
