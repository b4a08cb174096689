"""A console for operators: records, jobs, dead letters and what the app adds, as web pages.

::

    from holdfast.console import TokenAccess, console

    app.mount("/console", console(holdfast, access=TokenAccess(identify, operators={"ada"})))
"""

from collections.abc import Sequence
from typing import Any

from holdfast.console.access import Access, Operator, Role, TokenAccess
from holdfast.console.action import OperatorAction, operator_action
from holdfast.console.app import ConsoleApp
from holdfast.console.jobs import job_pages
from holdfast.console.overview import overview_page
from holdfast.console.page import (
    ConsoleError,
    Downloaded,
    NotShownError,
    Page,
    PageRequest,
    Redirected,
    Shown,
)
from holdfast.console.periodic import periodic_page
from holdfast.console.queues import queue_pages
from holdfast.console.records import record_pages
from holdfast.console.request_list import request_list_page
from holdfast.console.system import ReadSettings, system_page
from holdfast.console.tenant_rows import read_tenant_rows
from holdfast.console.tenants import tenant_pages
from holdfast.console.trace import trace_pages
from holdfast.server.app import Holdfast

__all__ = [
    "Access",
    "ConsoleError",
    "Downloaded",
    "NotShownError",
    "Operator",
    "OperatorAction",
    "Page",
    "PageRequest",
    "Redirected",
    "Role",
    "Shown",
    "TokenAccess",
    "console",
    "operator_action",
    "read_tenant_rows",
]


def console(
    holdfast: Holdfast[Any],
    *,
    access: Access,
    pages: Sequence[Page] = (),
    title: str = "Holdfast",
    settings: ReadSettings | None = None,
    idle_seconds: float = 30 * 60.0,
    max_seconds: float = 8 * 3600.0,
) -> ConsoleApp:
    """Return the console of an app, to be mounted at any path.

    ``access`` decides who may sign in, what they see and what they may do. ``pages`` are added
    to those of the library. ``settings`` returns what the page about the system shows of the app's
    settings, without secrets: by heading, the values by name. A session ends after
    ``idle_seconds`` without a request, and after ``max_seconds``.
    Replays, mismatches and refusals are logged from now on, unless
    ``Holdfast(request_log_seconds=0)`` says otherwise.
    """
    holdfast.log_requests()
    return ConsoleApp(
        holdfast,
        access=access,
        pages=[
            overview_page(holdfast),
            *record_pages(holdfast),
            request_list_page(),
            *job_pages(holdfast),
            periodic_page(holdfast),
            *queue_pages(holdfast),
            *trace_pages(holdfast),
            *pages,
            *tenant_pages(holdfast),
            system_page(holdfast, settings),
        ],
        title=title,
        idle_seconds=idle_seconds,
        max_seconds=max_seconds,
    )
