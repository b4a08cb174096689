"""Django middleware that guards views, in ``transaction.atomic()`` of the project's database.

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

from holdfast.core.idempotency_record import Response
from holdfast.core.policy import Policy
from holdfast.errors import RequestError, StoreError, StreamingResponseError
from holdfast.server.app import Holdfast
from holdfast.server.asgi import SCOPE_KEY
from holdfast.server.route_table import SAFE_METHODS, Guard, Match, guard_of, mark_guarded
from holdfast.server.sync_bridge import Bridge, SyncExecution, run_in_request_thread
from holdfast.server.wsgi import scope_of
from holdfast.stores.django import DjangoStore

__all__ = ["HoldfastMiddleware", "django_holdfast", "execution", "guard"]

View = TypeVar("View", bound=Callable[..., Any])

_REQUEST: Final = "holdfast.request"
# Attribute of a guarded request: the Holdfast error that its view raised, or None.
_GUARDED: Final = "_holdfast_error"


def guard(endpoint: str | None = None, *, policy: Policy | None = None) -> Callable[[View], View]:
    """Guard a view, for all methods except GET, HEAD, OPTIONS and TRACE."""

    def mark(view: View) -> View:
        mark_guarded(view, Guard(policy or Policy(), endpoint))
        return view

    return mark


def execution() -> SyncExecution:
    """Return the execution of the guarded view being served: request, ``enqueue``."""
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
        names = {
            option: options.pop(option.upper())
            for option in ("table_prefix", "schema")
            if option.upper() in options
        }
        store = DjangoStore(run_in_request_thread, using=using, **names)
        # A sweep here would need its own thread and connection: sweep with manage.py or a worker.
        self.holdfast = Holdfast(store, sweep_every_seconds=None, **given, **options)
        self.bridge = Bridge(self.holdfast)


@cache
def django_holdfast() -> _DjangoHoldfast:
    """Return Holdfast as configured by ``settings.HOLDFAST``, created once per process."""
    return _DjangoHoldfast()


class _Urls:
    """The guarded routes of a Django project, from its URL configuration."""

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
        self._get_response = get_response
        self._urls = _Urls()
        configured = django_holdfast()
        self._bridge = configured.bridge
        configured.holdfast.use_table(self._urls)
        self._middleware = configured.holdfast.middleware(self._inner)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Serve one Django request."""
        method = request.method or "GET"
        match = None if method in SAFE_METHODS else self._urls.find(method, request.path_info)
        if match is None:
            return self._get_response(request)
        limit = match.policy.max_body_bytes
        length = request.META.get("CONTENT_LENGTH") or "0"
        # A body over the limit is not read: the middleware refuses it by its length.
        is_too_long = length.isdigit() and int(length) > limit
        body = b"" if is_too_long else request.body
        scope = scope_of(request.META, method, request.path_info) | {_REQUEST: request}
        status, headers, content = self._bridge.serve(self._middleware, scope, body)
        response = HttpResponse(content, status=status)
        del response["Content-Type"]
        for name, value in headers:
            response[name.decode("latin-1")] = value.decode("latin-1")
        return response

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Keep Holdfast's errors from becoming Django's 500: the middleware renders them."""
        if not isinstance(error, (RequestError, StoreError)) or not hasattr(request, _GUARDED):
            return None
        setattr(request, _GUARDED, error)
        return HttpResponse(status=500)  # never sent: the error is raised again below

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        request = scope[_REQUEST]

        def handle() -> Response:
            setattr(request, _GUARDED, None)
            response = self._get_response(request)
            error = getattr(request, _GUARDED)
            if error is not None:
                raise error
            return _collected(response)

        await self._bridge.run_handler(scope[SCOPE_KEY], handle, send)


def _collected(response: Any) -> Response:
    if getattr(response, "streaming", False):
        raise StreamingResponseError(
            "a guarded view streams its response, which is stored with the transaction and must "
            "be complete: return a plain HttpResponse"
        )
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.items()
    ]
    headers += [
        (b"set-cookie", morsel.OutputString().encode("latin-1"))
        for morsel in response.cookies.values()
    ]
    return Response(response.status_code, tuple(headers), bytes(response.content))
