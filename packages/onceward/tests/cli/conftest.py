"""Fixtures that run ``onceward`` in an empty directory."""

from packages.protocol.tests.cli.conftest import cli, here

__all__ = ["cli", "here"]
