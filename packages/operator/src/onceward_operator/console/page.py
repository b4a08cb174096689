"""Pages of the console: what the console itself, a service or an app adds to it.

::

    async def show(request: PageRequest) -> Shown:
        rows = await request.store.read("SELECT … WHERE tenant = :tenant", …)
        return Shown("parcels.html", {"parcels": rows})

    console(onceward, access=…, pages=[Page("parcels", show, title="Parcels", group="Shop")])
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from onceward.errors import OncewardError
from onceward.ports import Store
from onceward.tenants import ALL_TENANTS, TenantFilter
from onceward_operator.console.access import Operator, Role

__all__ = [
    "ConsoleError",
    "Downloaded",
    "NotShownError",
    "Page",
    "PageHandler",
    "PageRequest",
    "Redirected",
    "Shown",
]


class ConsoleError(OncewardError):
    """A request of an operator that cannot be served; the message is shown to them."""

    # Of the response.
    status = 400


class NotShownError(ConsoleError):
    """There is no such thing, or it belongs to a tenant that the operator may not see."""

    # Of the response.
    status = 404


@dataclass(frozen=True, slots=True)
class Shown:
    """A page, rendered from a template. ``Page.templates`` says where it is looked for first."""

    # The name of a file in the directory ``templates``.
    template: str
    # What the template can use, besides what the layout needs.
    values: Mapping[str, Any] = field(default_factory=dict)
    # Of the response.
    status: int = 200


@dataclass(frozen=True, slots=True)
class Redirected:
    """Where to go on after an action: a path below the console, with an optional notice."""

    # Relative, with a query if there is one.
    path: str
    # Shown once, at the top of the page.
    notice: str | None = None


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A file that the browser saves, sent while it is made."""

    # Of the file.
    name: str
    # Such as ``text/csv``.
    media_type: str
    # The parts of the file, in order.
    content: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """One request of an operator, checked: session, role, and for actions the form's token."""

    # Who asks.
    operator: Operator
    # The database of the app.
    store: Store
    # When the request came in.
    now: datetime
    # The tenant that is looked at: one that the operator may see, or all.
    tenant: TenantFilter
    # Parameters of the query; the last one of each name, without empty ones.
    query: Mapping[str, str]
    # Fields of the form of an action.
    form: Mapping[str, str]
    # Parts of the path, such as ``id`` of ``jobs/{id}``.
    path: Mapping[str, str]
    # Of this request of the operator, for logs and audit events.
    request_id: str

    def own(self, tenant: str) -> str:
        """Return a tenant named by the path or a form. Raises ``NotShownError`` if it is hidden."""
        if not tenant or not self.operator.sees(tenant):
            raise NotShownError("there is no such tenant, or you may not see it")
        return tenant

    def reason(self) -> str:
        """Return why the operator acts, for the audit log. Raises ``ConsoleError`` without it."""
        text = self.form.get("reason", "").strip()
        if not 0 < len(text) <= _MAX_REASON:
            raise ConsoleError(
                f"say why, in 1 to {_MAX_REASON} characters: it is kept in the audit log"
            )
        return text

    def pager(self, path: str, after: str | None) -> dict[str, str | None]:
        """Return arguments of ``parts.pager(first, next)``: links to pages of the list at ``path``.

        ``after`` is where the next page begins, None on the last one. It is the parameter ``after``
        of that page; the filter stays.
        """
        kept = {k: v for k, v in self.query.items() if k not in {"after", "notice"}}
        first = f"{path}?{urlencode(kept)}" if kept else path
        return {
            "first": first if "after" in self.query else None,
            "next": f"{path}?{urlencode(kept | {'after': after})}" if after is not None else None,
        }

    @property
    def actor(self) -> str:
        """Who acts, for the audit log."""
        return f"{self.operator.subject} via console"

    @property
    def is_of_all_tenants(self) -> bool:
        """Whether rows of all tenants are shown."""
        return self.tenant is ALL_TENANTS


_MAX_REASON = 1000

PageHandler = Callable[[PageRequest], Awaitable[Shown | Redirected | Downloaded]]


@dataclass(frozen=True, slots=True)
class Page:
    """A page (``GET``) or an action (``POST``) at a path below the console."""

    # Relative, such as ``jobs/{id}/requeue``.
    path: str
    # Called after the session, the role and the form were checked.
    handler: PageHandler
    # The entry in the navigation; None: it has none.
    title: str | None = None
    # The heading above its entry.
    group: str = "Operations"
    # ``GET`` for a page, ``POST`` for an action.
    method: str = "GET"
    # Who may open it.
    role: Role = Role.VIEWER
    # Only for operators who see all tenants.
    needs_all_tenants: bool = False
    # The package whose directory ``templates`` has its template.
    templates: str = "onceward_operator.console"
    # Whether open pages are shown again after changes: what the template has in ``parts.live()``.
    # It is rendered once for all operators with the same role, tenants and right to payloads, and
    # must not depend on anything else of the one who asks.
    live: bool = False
