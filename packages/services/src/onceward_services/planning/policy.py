"""The idempotency policy of the planning service: the library's defaults."""

from typing import Final

from onceward import Policy

__all__ = ["POLICY"]

POLICY: Final = Policy(name="planning")
