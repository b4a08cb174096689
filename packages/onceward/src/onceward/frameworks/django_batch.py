"""The batch endpoint of a Django project: a view. Items pass through the project's middleware.

::

    urlpatterns = [path("batch", onceward.django.batch), …]
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

from onceward_protocol.extras import needs_extra

with needs_extra("django"):
    from django.conf import settings as django_settings
    from django.core.handlers.wsgi import WSGIHandler, WSGIRequest
    from django.db import connections
    from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
    from django.urls import get_urlconf, resolve, set_urlconf

from onceward.frameworks.django import (
    django_onceward,
    django_response,
    mark_batch_view,
    options_of_batch,
    policy_of_guard,
    response_of_django,
)
from onceward.frameworks.sync_bridge import SyncBatch
from onceward.frameworks.wsgi import head_of
from onceward.guard.route_table import Guard, Match, guard_of
from onceward.records import Response

__all__ = ["batch"]


class _EveryDatabase(set[str]):
    """Excludes a view from ``ATOMIC_REQUESTS`` of all databases: each item has its own."""

    def __contains__(self, _alias: object) -> bool:
        return True


def batch(request: HttpRequest) -> HttpResponse:
    """Take many guarded requests in one. Its path is that of its route.

    ``ONCEWARD = {"BATCH": BatchOptions(…)}`` sets its limits.
    """
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    meta: dict[str, Any] = {**request.META, "wsgi.url_scheme": request.scheme}
    urlconf = get_urlconf()
    try:
        served = _sync_batch().serve(
            head_of(meta, "POST", request.path_info),
            meta,
            read=lambda _limit: bytes(request.body),
            find=partial(_find, getattr(request, "urlconf", None)),
            run=partial(_run, request),
        )
    finally:
        set_urlconf(urlconf)  # each request sets its own
    response: HttpResponse = django_response(served)
    return response


# Each item is checked for CSRF, with the headers and cookies of the batch, and has its transaction.
setattr(batch, "csrf_exempt", True)  # noqa: B010 - what Django's decorators set
setattr(batch, "_non_atomic_requests", _EveryDatabase())  # noqa: B010
mark_batch_view(batch)


def _sync_batch() -> SyncBatch:
    return SyncBatch(django_onceward().bridge, options_of_batch())


# -- one item ---------------------------------------------------------------------------------


def _run(outer: HttpRequest, environ: dict[str, Any]) -> Response:
    """Serve the request of an item by all of the project's middleware."""
    request = WSGIRequest(environ)
    if getattr(outer, "_dont_enforce_csrf_checks", False):  # of Django's test client
        request._dont_enforce_csrf_checks = True  # noqa: SLF001
    response: Any = _handler(tuple(django_settings.MIDDLEWARE)).get_response(request)
    try:
        return response_of_django(response)
    finally:
        # Not close(): it would end the request of the batch.
        for close in response._resource_closers:  # noqa: SLF001
            with suppress(Exception):
                close()
        for connection in connections.all(initialized_only=True):
            if connection.errors_occurred:  # as at the end of each request
                connection.close_if_unusable_or_obsolete()


@cache
def _handler(_middleware: tuple[str, ...]) -> WSGIHandler:
    """Return what runs the project's middleware and views, also below an ASGI server."""
    return WSGIHandler()


def _find(urlconf: Any, method: str, path: str) -> Match | None:
    """Return what guards a request; None if nothing certainly does."""
    try:
        found = resolve(path, urlconf=urlconf)
    except Http404:
        return None
    for view in _candidates(found.func, method.lower()):
        guard = guard_of(view)
        if guard is not None:
            name = guard.endpoint or f"{method} /{found.route}"
            return Match(name, policy_of_guard(guard), {})
    return None


def _candidates(view: Any, method: str) -> Iterator[Any]:
    """Yield what serves a method: a function, or the handler of a class and its ``dispatch``."""
    owner = getattr(view, "cls", None) or getattr(view, "view_class", None)
    if owner is None:
        yield view
        return
    actions = getattr(view, "actions", None)
    name = actions.get(method) if isinstance(actions, Mapping) else method
    handler = getattr(owner, name, None) if name else None
    if handler is None:
        return
    yield handler
    yield getattr(owner, "dispatch", None)
    # @api_view makes a class whose handlers call the function.
    for cell in getattr(handler, "__closure__", None) or ():
        with suppress(ValueError):
            if isinstance(guard_of(cell.cell_contents), Guard):
                yield cell.cell_contents
