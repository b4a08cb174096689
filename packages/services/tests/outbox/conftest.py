"""A queue and a real server for the tests of the services' outbox profiles."""

from packages.onceward.tests.outbox.conftest import lab, quick_path, server

__all__ = ["lab", "quick_path", "server"]
