"""A console for operators: records, jobs, dead letters and what the app adds, as web pages.

::

    from onceward_operator.console import TokenAccess, console

    app.mount("/console", console(onceward, access=TokenAccess(identify, operators={"ada"})))
"""

from collections.abc import Sequence
from typing import Any

from onceward.app import Onceward
from onceward_operator.console.access import Access, Operator, Role, TokenAccess
from onceward_operator.console.action import OperatorAction, operator_action
from onceward_operator.console.app import ConsoleApp
from onceward_operator.console.jobs import job_pages
from onceward_operator.console.overview import overview_page
from onceward_operator.console.page import (
    ConsoleError,
    Downloaded,
    NotShownError,
    Page,
    PageRequest,
    Redirected,
    Shown,
)
from onceward_operator.console.periodic import periodic_page
from onceward_operator.console.queues import queue_pages
from onceward_operator.console.records import record_pages
from onceward_operator.console.request_list import request_list_page
from onceward_operator.console.system import ReadSettings, system_page
from onceward_operator.console.tenant_rows import read_tenant_rows
from onceward_operator.console.tenants import tenant_pages
from onceward_operator.console.trace import trace_pages

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
    onceward: Onceward[Any],
    *,
    access: Access,
    pages: Sequence[Page] = (),
    title: str = "Onceward",
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
    ``Onceward(request_log_seconds=0)`` says otherwise.
    """
    onceward.runtime.log_requests()
    return ConsoleApp(
        onceward,
        access=access,
        pages=[
            overview_page(onceward),
            *record_pages(onceward),
            request_list_page(),
            *job_pages(onceward),
            periodic_page(onceward),
            *queue_pages(onceward),
            *trace_pages(onceward),
            *pages,
            *tenant_pages(onceward),
            system_page(onceward, settings),
        ],
        title=title,
        idle_seconds=idle_seconds,
        max_seconds=max_seconds,
    )
