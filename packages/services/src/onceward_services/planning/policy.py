"""The idempotency policy of the planning service."""

from typing import Final

from onceward import Policy

__all__ = ["POLICY"]

# Document 003 lists the headers of a replay: those that every record keeps.
POLICY: Final = Policy(name="planning", replay_headers=())
