"""Operation of an entry on its entity, and the HTTP method it is sent with."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["METHODS", "Operation", "OperationName"]

# The values of ``Operation``: either may be given where an app names one.
OperationName = Literal["create", "update", "patch", "delete"]


class Operation(StrEnum):
    """Operation of an entry on its entity; sent as POST, PUT, PATCH or DELETE."""

    # Sent as POST.
    CREATE = "create"
    # Sent as PUT.
    UPDATE = "update"
    # Sent as PATCH.
    PATCH = "patch"
    # Sent as DELETE.
    DELETE = "delete"


METHODS: Final[Mapping[Operation, str]] = MappingProxyType(
    {
        Operation.CREATE: "POST",
        Operation.UPDATE: "PUT",
        Operation.PATCH: "PATCH",
        Operation.DELETE: "DELETE",
    }
)
"""HTTP method by operation."""
