"""Django: a middleware that guards views, inside ``transaction.atomic()`` of the project.

::

    # settings.py
    MIDDLEWARE = ["holdfast.server.django_views.HoldfastMiddleware", …]

    # views.py
    @guard()
    def create_order(request): …
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final, TypeVar

from django.conf import settings as django_settings
from django.http import HttpRequest, HttpResponse
from django.urls import Resolver404, resolve

from holdfast.core.idempotency_record import Reply
from holdfast.core.policy import Policy
from holdfast.errors import RequestError, StoreError, StreamingResponseError
from holdfast.server.app import Holdfast
from holdfast.server.asgi import SCOPE_KEY
from holdfast.server.route_table import SAFE_METHODS, Guard, Match, guard_of, mark_guarded
from holdfast.server.sync_bridge import Bridge, SyncExecution, run_in_request_thread
from holdfast.server.wsgi import split_header
from holdfast.stores.django import DjangoStore

__all__ = ["HoldfastMiddleware", "django_holdfast", "execution", "guard"]

View = TypeVar("View", bound=Callable[..., Any])

_REQUEST: Final = "holdfast.request"
# On a guarded request: the error of ours that its view raised, if it did.
_GUARDED: Final = "_holdfast_error"


def guard(endpoint: str | None = None, *, policy: Policy | None = None) -> Callable[[View], View]:
    """Guard a view: every method that may write."""

    def mark(view: View) -> View:
        mark_guarded(view, Guard(policy or Policy(), endpoint))
        return view

    return mark


def execution() -> SyncExecution:
    """Return the guarded request being served: who called, its ids, ``enqueue``."""
    return django_holdfast().bridge.execution


class _DjangoHoldfast:
    """Holdfast on the project's database, one per process."""

    def __init__(self) -> None:
        options: dict[str, Any] = dict(getattr(django_settings, "HOLDFAST", {}))
        using = options.pop("USING", "default")
        identify = options.pop("IDENTIFY", None)
        if isinstance(identify, str):
            module, _, name = identify.rpartition(".")
            identify = getattr(import_module(module), name)
        given = {} if identify is None else {"identify": identify}
        store = DjangoStore(run_in_request_thread, using=using)
        # A thread of the sweep would need a connection of its own: manage.py or a worker sweeps.
        self.holdfast = Holdfast(store, sweep_every_seconds=None, **given, **options)
        self.bridge = Bridge(self.holdfast)


@cache
def django_holdfast() -> _DjangoHoldfast:
    """Return Holdfast as ``settings.HOLDFAST`` wants it, made once per process."""
    return _DjangoHoldfast()


class _Urls:
    """The guard table of a Django project: its URL configuration."""

    def find(self, method: str, path: str) -> Match | None:
        """Return the guarded view of a request, or None."""
        try:
            found = resolve(path)
        except Resolver404:
            return None
        chosen = guard_of(found.func) or guard_of(getattr(found.func, "view_class", None))
        if chosen is None or method in SAFE_METHODS:
            return None
        params = {name: str(value) for name, value in found.kwargs.items()}
        params |= {f"arg{index}": str(value) for index, value in enumerate(found.args)}
        return Match(chosen.endpoint or f"{method} /{found.route}", chosen.policy, params)


class HoldfastMiddleware:
    """Guards the views that are marked with ``guard``. Comes first in ``MIDDLEWARE``."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        """Wrap the rest of the project."""
        self._get_response = get_response
        self._urls = _Urls()
        made = django_holdfast()
        self._bridge = made.bridge
        made.holdfast.use_table(self._urls)
        self._middleware = made.holdfast.middleware(self._inner)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Serve one request."""
        method = request.method or "GET"
        match = None if method in SAFE_METHODS else self._urls.find(method, request.path_info)
        if match is None:
            return self._get_response(request)
        limit = match.policy.max_body_bytes
        length = request.META.get("CONTENT_LENGTH") or "0"
        # What is too long is not read: the middleware says so by the length alone.
        is_long = length.isdigit() and int(length) > limit
        body = b"" if is_long else request.body
        scope = {
            "type": "http",
            "method": method,
            "path": request.path_info,
            "query_string": request.META.get("QUERY_STRING", "").encode("latin-1"),
            "headers": [
                (header, part)
                for name, value in request.headers.items()
                for header in (name.lower().encode("latin-1"),)
                for part in split_header(header, value)
            ],
            _REQUEST: request,
        }
        status, headers, content = self._bridge.serve(self._middleware, scope, body)
        response = HttpResponse(content, status=status)
        del response["Content-Type"]
        for name, value in headers:
            response[name.decode("latin-1")] = value.decode("latin-1")
        return response

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Keep our own errors from becoming Django's 500: they are answered in our words."""
        if not isinstance(error, (RequestError, StoreError)) or not hasattr(request, _GUARDED):
            return None
        setattr(request, _GUARDED, error)
        return HttpResponse(status=500)  # never sent: the error is raised again below

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        request = scope[_REQUEST]

        def handle() -> Reply:
            setattr(request, _GUARDED, None)
            response = self._get_response(request)
            error = getattr(request, _GUARDED)
            if error is not None:
                raise error
            return _collected(response)

        reply = await self._bridge.run_in_thread(scope[SCOPE_KEY], handle)
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
        )
        await send({"type": "http.response.body", "body": reply.body})


def _collected(response: Any) -> Reply:
    if getattr(response, "streaming", False):
        raise StreamingResponseError(
            "a guarded view streams: its answer is stored with the transaction and must be complete"
        )
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.items()
    ]
    headers += [
        (b"set-cookie", morsel.OutputString().encode("latin-1"))
        for morsel in response.cookies.values()
    ]
    return Reply(response.status_code, tuple(headers), bytes(response.content))
