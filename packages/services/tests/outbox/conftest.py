"""A queue and a real server for the tests of the services' outbox profiles."""

from packages.outbox.tests.conftest import lab, quick_path, server

__all__ = ["lab", "quick_path", "server"]
