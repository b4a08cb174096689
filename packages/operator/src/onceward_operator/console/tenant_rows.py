"""A page of rows whose primary key is tenant and id: those of one tenant, or of all."""

from collections.abc import Sequence
from typing import Any, Final

from onceward.ports import Row
from onceward.tenants import tenant_or_none
from onceward_operator.console.page import PageRequest

__all__ = ["read_tenant_rows"]

_SEPARATOR: Final = "\x1f"


async def read_tenant_rows(
    request: PageRequest, *, of_all: str, of_one: str, limit: int
) -> tuple[Sequence[Row], str | None]:
    """Return at most ``limit`` rows, and where the next page begins, for ``PageRequest.pager``.

    ``of_all`` is a query of the rows after ``:after_tenant`` and ``:after_id``, ``of_one`` of those
    of ``:tenant`` after ``:after_id``, both with ``LIMIT :limit`` and in this order.
    """
    tenant = tenant_or_none(request.tenant)
    after_tenant, _, after_id = request.query.get("after", "").rpartition(_SEPARATOR)
    values: dict[str, Any] = {"after_id": after_id, "limit": limit + 1}
    if tenant is None:
        rows = await request.store.read(of_all, values | {"after_tenant": after_tenant})
    else:
        rows = await request.store.read(of_one, values | {"tenant": tenant})
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]
    return rows[:limit], f"{last['tenant']}{_SEPARATOR}{last['id']}"
