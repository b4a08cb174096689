"""Shutdown of ``holdfast serve`` with several processes."""

from collections.abc import Callable

from packages.services.tests.cli.conftest import Server

Serve = Callable[..., Server]


def test_workers_stop_without_a_fatal_error(serve: Serve) -> None:
    server = serve("--workers", "2")
    assert server.stop() == 0
    assert "Fatal" not in server.stderr()
