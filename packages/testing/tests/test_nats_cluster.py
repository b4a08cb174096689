"""The cluster of the test kit: three nodes that agree, and a server that can be robbed."""

import json
import secrets
import time
from contextlib import suppress

import pytest

from onceward_testing.nats_server import RealNatsCluster
from onceward_testing.servers import RealNats

pytestmark = pytest.mark.xdist_group("nats-cluster")


def created(cluster: RealNatsCluster) -> str:
    """Create a stream on all nodes; return its name, which is also the prefix of its subjects."""
    name = f"kept-{secrets.token_hex(4)}"
    config = {"name": name, "subjects": [f"{name}.>"], "num_replicas": 3, "storage": "file"}
    body = json.dumps(config).encode()
    made = cluster.nodes[0].request(f"$JS.API.STREAM.CREATE.{name}", body)
    assert made["config"]["num_replicas"] == 3
    return name


def test_three_nodes_keep_a_stream_and_know_its_leader(nats_cluster: RealNatsCluster) -> None:
    assert len(nats_cluster.running) == 3
    assert nats_cluster.url().count("nats://127.0.0.1:") == 3
    stream = created(nats_cluster)
    leader = nats_cluster.leader(stream)
    assert leader.request(f"{stream}.one", b"1")["seq"] == 1
    follower = next(node for node in nats_cluster.nodes if node is not leader)
    follower.kill()
    assert follower not in nats_cluster.running
    assert nats_cluster.leader(stream) is leader
    assert leader.request(f"{stream}.two", b"2")["seq"] == 2  # two of three are enough
    nats_cluster.start()
    assert nats_cluster.running == nats_cluster.nodes


def test_an_isolated_node_takes_no_messages_until_the_network_is_healed(
    nats_cluster: RealNatsCluster,
) -> None:
    stream = created(nats_cluster)
    leader = nats_cluster.leader(stream)
    nats_cluster.isolate(leader)
    others = [node for node in nats_cluster.nodes if node is not leader]
    # The other two elect one of themselves; the old leader is not told.
    new = others_leader(others, stream)
    assert new in {node.server_name for node in others}
    assert others[0].request(f"{stream}.one", b"1")["seq"] == 1
    with pytest.raises(OSError):
        leader.request(f"{stream}.two", b"2")
    nats_cluster.heal_network()
    deadline = time.monotonic() + 60
    while current_replicas(others[0], stream) < 2:
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
    cluster = RealNatsCluster()
    with pytest.raises(RuntimeError, match="no more"), cluster:
        pytest.fail("it started")
    cluster.close()  # idempotent
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
