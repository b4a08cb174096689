"""Permissions of members of an organization, by the claim ``roles`` of their tokens."""

from typing import Final

from onceward import Execution, Principal
from onceward.errors import ForbiddenError

__all__ = ["RoleRules"]

_ADMIN: Final = "admin"
# Each role, and what it is for.
_WRITERS: Final = frozenset({"planner", _ADMIN})
_AUDITORS: Final = frozenset({"auditor", _ADMIN})
_ALL: Final = frozenset({"viewer", "planner", _ADMIN, "auditor"})


class RoleRules:
    """Viewers read, planners also write, auditors also see whole hashes, admins do everything.

    A token without any of these roles is a planner's, unless roles are required.
    """

    def __init__(self, *, required: bool) -> None:
        self._required = required

    def check_read(self, caller: Principal) -> None:
        """Raise ``ForbiddenError`` if the caller may not read."""
        if self._required and _ALL.isdisjoint(caller.roles):
            raise ForbiddenError(
                "your token has no role of planning: viewer, planner, admin or auditor"
            )

    def check_write(self, run: Execution) -> None:
        """Raise ``ForbiddenError`` if the caller may not write.

        It is not stored: with another token the same key may be used again.
        """
        roles = run.request.principal.roles
        if not self._required and _ALL.isdisjoint(roles):
            return
        if _WRITERS.isdisjoint(roles):
            run.no_store()
            raise ForbiddenError("this needs the role planner or admin")

    def check_own(self, run: Execution) -> None:
        """Raise ``ForbiddenError`` if the caller may not change what is only theirs.

        Every member may who may read. The refusal is not stored.
        """
        try:
            self.check_read(run.request.principal)
        except ForbiddenError:
            run.no_store()
            raise

    @staticmethod
    def check_admin(caller: Principal) -> None:
        """Raise ``ForbiddenError`` if the caller is not an admin."""
        if _ADMIN not in caller.roles:
            raise ForbiddenError("this needs the role admin")

    def sees_hashes(self, caller: Principal) -> bool:
        """Return whether the caller may see whole payload hashes."""
        return not _AUDITORS.isdisjoint(caller.roles)
