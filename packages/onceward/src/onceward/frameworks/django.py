"""Django: ``@guard(…)`` decides around the view, after middleware, decorators and permissions.

The guard is a ``transaction.atomic()`` of the project's database around the view. ``batch`` is the
view of the batch endpoint, whose items pass through the project's middleware.

::

    @login_required
    @guard("orders.create")
    def create_order(request): …

    class OrderViewSet(ModelViewSet):
        @guard("orders.create")
        def create(self, request): …

    urlpatterns = [path("batch", onceward.django.batch), …]
"""

import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial, wraps
from http.cookies import Morsel
from inspect import iscoroutine, iscoroutinefunction, unwrap
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

from onceward.guard.pipeline import id_headers
from onceward.guard.policy import Policy
from onceward_protocol.extras import needs_extra

with needs_extra("django"):
    from django import urls
    from django.conf import settings as django_settings
    from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
    from django.core.handlers.exception import response_for_exception
    from django.core.handlers.wsgi import WSGIHandler, WSGIRequest
    from django.core.signals import setting_changed
    from django.db import connections
    from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed
    from django.http.multipartparser import MultiPartParserError
    from django.http.request import RawPostDataException, UnreadablePostError
    from django.http.response import HttpResponseBase
    from django.utils.module_loading import import_string

from onceward.app import Onceward
from onceward.batch.options import BatchOptions, batch_header
from onceward.config import GuardConfig
from onceward.errors import (
    ConfigurationError,
    LengthRequiredError,
    NotAuthenticatedError,
    OncewardError,
    RequestError,
    StoreUnavailableError,
    UsageError,
)
from onceward.frameworks.views import (
    EndpointNames,
    check_endpoint,
    check_policy,
    name_of_view,
    no_caller,
    refuse_generator,
    with_route,
)
from onceward.frameworks.wsgi import (
    NO_POLICY,
    Bridge,
    Environ,
    Served,
    SyncBatch,
    SyncExecution,
    batch_options,
    broken_off,
    check_file,
    encoded_headers,
    head_of,
    parsed_form,
    refused_body,
    with_header,
)
from onceward.guard.request import Headers, Principal, RequestHead
from onceward.guard.request_thread import has_request_thread, run_in_request_thread
from onceward.guard.route_table import SAFE_METHODS, Guard, Match, guard_of, mark_guarded
from onceward.records import Response
from onceward.stores.errors import refusal_of
from onceward.stores.sessions.django import DjangoStore

View = TypeVar("View", bound=Callable[..., Any])
# Takes the request, of Django REST framework where the view is one of its views.
GetPrincipal = Callable[[Any], Principal]

_HEAD: Final = "onceward.head"
_WRITING_HANDLERS: Final = ("post", "put", "patch", "delete")
_WRITING_ACTIONS: Final = ("create", "update", "partial_update", "destroy")
# Django turns these into responses outside the view, where the guard could not store them.
_HANDLED: Final = (Http404, PermissionDenied, BadRequest, SuspiciousOperation, MultiPartParserError)

# Keys of settings.ONCEWARD that are options of the store.
_OF_STORE: Final = (
    "table_prefix",
    "schema",
    "claim_seconds",
    "statement_seconds",
    "commit_seconds",
)
# And those of ``GuardConfig``; the others are those of ``Onceward``.
_OF_CONFIG: Final = frozenset(option.name for option in fields(GuardConfig))


def guard(
    endpoint: str | None = None,
    *,
    policy: Policy | None = None,
    principal: GetPrincipal | None = None,
) -> Callable[[View], View]:
    """Guard a view, for all methods except GET, HEAD, OPTIONS and TRACE.

    Goes on a function, a method of a class-based view or viewset, or the class; on functions below
    ``@api_view`` and below decorators that check the caller. ``principal`` takes the request and
    returns the caller; the default is ``user_principal``. Raises ``ConfigurationError`` if neither
    this nor the settings say who the caller is.
    """
    check_endpoint(endpoint)
    check_policy(policy)
    if principal is None and not _has_caller():
        raise _no_caller(f"a view has @guard({endpoint or ''!r})")
    chosen = _ViewGuard(endpoint, policy, principal)
    return cast("Callable[[View], View]", chosen.wrap)


def execution() -> SyncExecution:
    """Return the execution of the guarded view being served: request, ``enqueue``."""
    return django_onceward().bridge.execution


def user_principal(request: Any) -> Principal:
    """Return ``request.user``: its primary key is tenant and actor. Raises if it is anonymous."""
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        raise NotAuthenticatedError("sign in first")
    if user.pk is None:  # str(None) would be one tenant for all such users
        raise ConfigurationError(
            'request.user has no primary key: name the caller by ONCEWARD = {"PRINCIPAL": …}'
        )
    return Principal(tenant=str(user.pk), actor=str(user.pk))


# -- settings --------------------------------------------------------------------------------------


def _settings() -> Mapping[str, Any]:
    given: Mapping[str, Any] = getattr(django_settings, "ONCEWARD", {})
    return {str(name).lower(): value for name, value in given.items()}


class _DjangoOnceward:
    """Onceward on the project's database, one per process."""

    def __init__(self) -> None:
        # A sweep here would need its own thread and connection: sweep with manage.py or a worker.
        # Records in memory would outlive a test's transaction, which Django rolls back.
        options = {"sweep_every_seconds": None, "memory_bytes": 0, **_settings()}
        for name in ("identify", "principal", "tenants", "error_format", "policy"):
            try:
                if isinstance(options.get(name), str):
                    options[name] = import_string(options[name])
                if name == "policy":
                    check_policy(options.get(name))
            except (ImportError, ConfigurationError) as error:
                raise ConfigurationError(f'settings.ONCEWARD["{name.upper()}"]: {error}') from error
        self.using: str = options.pop("using", "default")
        if self.using not in django_settings.DATABASES:
            raise ConfigurationError(
                f'settings.ONCEWARD["USING"]: there is no database {self.using!r} in '
                f"settings.DATABASES, which has {', '.join(django_settings.DATABASES)}"
            )
        principal: GetPrincipal | None = options.pop("principal", None)
        self.batch = batch_options(options.pop("batch", None)) or BatchOptions()
        of_store = {name: options.pop(name) for name in _OF_STORE if name in options}
        rare = {name: options.pop(name) for name in _OF_CONFIG & options.keys()}
        try:
            self.store = DjangoStore(self._run_in_thread, using=self.using, **of_store)
            self.onceward = Onceward(self.store, config=GuardConfig(**rare), **options)
            self.bridge = Bridge(self.onceward, principal)
        except (ConfigurationError, TypeError) as error:
            raise ConfigurationError(f"settings.ONCEWARD: {error}") from error
        self.names = EndpointNames()

    def _run_in_thread(self, work: Callable[[], Any]) -> Awaitable[Any]:
        """Run a function in the request's thread, or without one in a thread of a pool.

        Django closes the connection of a request; that of a thread of a pool would stay open.
        """

        def run_and_close() -> Any:
            try:
                return work()
            finally:
                connection = connections[self.using]
                if not connection.in_atomic_block:
                    connection.close()

        return run_in_request_thread(work if has_request_thread() else run_and_close)


@cache
def django_onceward() -> _DjangoOnceward:
    """Return Onceward as configured by ``settings.ONCEWARD``, created once per process."""
    setting_changed.connect(_forget, dispatch_uid="onceward")  # sent by override_settings of tests
    return _DjangoOnceward()


def _forget(*, setting: str, **_: Any) -> None:
    if setting in ("ONCEWARD", "DATABASES") and django_onceward.cache_info().currsize:
        configured = django_onceward()
        django_onceward.cache_clear()
        configured.bridge.close()


def _has_caller() -> bool:
    """Whether the settings say who the caller is; True if that is only known with a request."""
    if not django_settings.configured or {"identify", "principal", "tenants"} & _settings().keys():
        return True
    if "rest_framework" in sys.modules:  # its requests have a user, without a middleware
        return True
    return any(map(_sets_user, django_settings.MIDDLEWARE))


def _sets_user(middleware: str) -> bool:
    """Whether it is ``AuthenticationMiddleware`` or derived from it, or cannot be imported yet."""
    try:
        found = import_string(middleware)
    except ImportError:
        return True
    names = (base.__name__ for base in getattr(found, "__mro__", ()))
    return "AuthenticationMiddleware" in names


def _no_caller(what: str) -> ConfigurationError:
    return no_caller(
        what,
        'ONCEWARD = {"PRINCIPAL": "shop.tenants.member"} with a function of the request that '
        "returns Principal(tenant=…, actor=…), or add AuthenticationMiddleware",
        'ONCEWARD = {"TENANTS": "onceward.SINGLE_TENANT"}',
    )


class OncewardMiddleware:
    """Optional: turns Onceward's errors into responses in views that are not guarded.

    Adds the request's ids to the 500 of a guarded view.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Serve one Django request."""
        response = self._get_response(request)
        head = request.META.get(_HEAD)
        for name, value in () if head is None else id_headers(head):
            response.headers.setdefault(name.decode(), value.decode("latin-1"))
        return response

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Respond with a Onceward error that a view raised."""
        error = refusal_of(error) or error
        if not isinstance(error, RequestError | StoreUnavailableError):
            return None
        head = head_of(request.META, request.method or "GET", request.path_info)
        return django_response(django_onceward().bridge.refuse(error, head))


# -- views -----------------------------------------------------------------------------------------


class _ViewGuard:
    """One ``guard(…)``."""

    def __init__(
        self, endpoint: str | None, policy: Policy | None, principal: GetPrincipal | None
    ) -> None:
        self._guard = Guard(policy or NO_POLICY, endpoint)
        self._principal = principal
        # One guard for all handlers of a class: its name is the prefix of those of the actions.
        self._is_of_class = False

    def wrap(self, view: Any) -> Any:
        """Return the guarded function, or the class with its writing handlers guarded."""
        if isinstance(view, type):
            self._is_of_class = True
            # Also ``dispatch``, for the handlers that a subclass adds or overrides.
            for name, handler in _handlers_of(view).items():
                setattr(view, name, self.wrap(handler))
            return view
        if hasattr(view, "view_class") or hasattr(view, "cls"):
            raise ConfigurationError(
                f"guard is above as_view() or @api_view of {view.__module__}.{view.__name__}, "
                "where it would decide before the view has authenticated its caller: put @guard "
                "below @api_view, or on the class or its methods"
            )
        _refuse_function(view)
        if not isinstance(view, partial):  # method_decorator makes one for each request
            name_of_view(view)  # refuses handlers of GET

        @wraps(view)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self._call(view, args, kwargs)

        mark_guarded(guarded, self._guard)
        # Excluded from ``ATOMIC_REQUESTS``: the guard begins the transaction.
        excluded = _NonAtomic(getattr(view, "_non_atomic_requests", ()))
        guarded._non_atomic_requests = excluded  # type: ignore[attr-defined]  # noqa: SLF001
        return guarded

    def _call(self, view: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        instance, request = _instance_and_request(view, args)
        if request.method in SAFE_METHODS or django_onceward().bridge.is_serving:
            # Inside a guarded view, e.g. partial_update that calls update, the outer guard counts.
            return view(*args, **kwargs)
        if getattr(view, "__name__", "") != "dispatch":
            return self._serve(view, instance, request, args, kwargs)
        # Around dispatch the guard would decide before mixins and REST framework have checked the
        # caller. So it is put around the handler that dispatch calls.
        if instance is None:
            raise ConfigurationError(
                "guard on dispatch must be the innermost decorator: the last in the list of "
                "method_decorator"
            )
        self._is_of_class = True
        method = request.method.lower()
        handler = getattr(instance, method, None)
        if handler is not None and guard_of(handler) is None:
            _refuse_function(handler, type(instance))
            guarded = partial(self._serve_handler, handler, instance)
            mark_guarded(guarded, self._guard)
            setattr(instance, method, guarded)
        return view(*args, **kwargs)

    def _serve_handler(
        self, handler: Any, instance: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return self._serve(handler, instance, request, (request, *args), kwargs)

    def _serve(
        self,
        view: Any,
        instance: Any,
        request: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        configured = django_onceward()
        owner = None if instance is None else type(instance)
        name = name_of_view(view, owner)
        # REST framework's request wraps Django's.
        plain: HttpRequest = getattr(request, "_request", request)
        found = plain.resolver_match
        # The name of the viewset's method; empty for other views.
        actions = getattr(instance, "action_map", None) or {}
        action: str = actions.get((plain.method or "").lower(), "")
        params = {key: str(value) for key, value in kwargs.items()}
        if found is not None:
            params |= {f"arg{index}": str(value) for index, value in enumerate(found.args)}
        endpoint = self._guard.endpoint
        if endpoint is None:
            endpoint = f"{plain.method} {name if found is None else f'/{found.route}'}"
        else:
            if self._is_of_class and action:
                endpoint = f"{endpoint}.{action}"
            configured.names.add(
                endpoint, name.rpartition(".")[0] if owner and self._is_of_class else name
            )
            params = with_route(params, _later_route(plain, action))
        policy = configured.bridge.guard_for(self._guard, name).policy

        def handle() -> tuple[Response, Any]:
            own = _response_of(view, request, args, kwargs)
            if iscoroutine(own):
                own.close()
                raise _async_view(name)
            if not isinstance(own, HttpResponseBase):
                raise UsageError(
                    f"the guarded view {name} must return an HttpResponse, not {own!r}"
                )
            own = _complete(own, name, policy.max_response_bytes)
            return _response_of_django(own), own

        head, body = _head_and_body(request, plain, policy.max_body_bytes)
        plain.META[_HEAD] = head
        served = configured.bridge.serve(
            head,
            Match(endpoint, policy, params),
            body,
            handle,
            principal=self._principal_of(configured.bridge, request),
            added_headers=_batch_headers(plain),
        )
        return django_response(served)

    def _principal_of(self, bridge: Bridge, request: Any) -> Callable[[], Principal] | None:
        chosen = self._principal or bridge.principal
        if chosen is None:
            if bridge.onceward.runtime.callers.has_identify:
                return None
            if not hasattr(request, "user"):
                raise _no_caller(f"{request.method} {request.path} is guarded")
            chosen = user_principal
        return partial(chosen, request)


class _NonAtomic(set[str]):
    """Databases that are excluded, and Onceward's: its alias is looked up when it is needed."""

    def __contains__(self, alias: object) -> bool:
        return super().__contains__(alias) or alias == django_onceward().using


def _handlers_of(view: type) -> dict[str, Any]:
    """Return the handlers of a class that write, and its ``dispatch``."""
    path = f"{view.__module__}.{view.__qualname__}"
    names = {*_WRITING_HANDLERS, *_WRITING_ACTIONS}
    for attribute in dir(view):
        mapping = getattr(getattr(view, attribute, None), "mapping", None)
        if isinstance(mapping, Mapping):  # a method of a viewset with ``@action``
            names |= {mapping[method] for method in _WRITING_HANDLERS if method in mapping}
    found = {name: getattr(view, name) for name in names if callable(getattr(view, name, None))}
    if not found:
        raise ConfigurationError(
            f"{path} is guarded, but has no handler of POST, PUT, PATCH or DELETE"
        )
    inherited = getattr(view, "dispatch", None)
    if inherited is None:
        raise ConfigurationError(
            f"{path} is guarded, but is no view: guard a function, or a class that derives from "
            "Django's View or from APIView"
        )
    return {**found, "dispatch": inherited}


def _refuse_function(view: Any, owner: type | None = None) -> None:
    """Raise ``ConfigurationError`` for an async view, and for one that streams."""
    if iscoroutinefunction(view):
        raise _async_view(name_of_view(view, owner))
    refuse_generator(view)


def _async_view(view: str) -> ConfigurationError:
    return ConfigurationError(
        f"{view} is async, but its transaction belongs to a thread: make it a plain def"
    )


def _instance_and_request(view: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the instance of a class-based view, or None, and the request."""
    instance = None
    if isinstance(view, partial):  # of method_decorator: a bound method
        instance = getattr(view.func, "__self__", None)
    elif args and not _is_request(args[0]):
        instance, args = args[0], args[1:]
    if not args or not _is_request(args[0]):
        name = name_of_view(view)
        step = name.rpartition(".")[2].removeprefix("perform_")
        fix = f": guard {step}(), which calls it" if step in _WRITING_ACTIONS else ""
        raise ConfigurationError(f"{name} is guarded, but is not a view{fix}")
    return instance, args[0]


def _is_request(value: Any) -> bool:
    return isinstance(getattr(value, "_request", value), HttpRequest)


# -- requests and responses ------------------------------------------------------------------------


def _head_and_body(
    request: Any, plain: HttpRequest, limit: int
) -> tuple[RequestHead, bytes | Callable[[], bytes]]:
    """Return the head of the request, and its body."""
    head = head_of(plain.META, plain.method or "GET", plain.path_info)
    length = plain.META.get("CONTENT_LENGTH") or "0"
    if length.isdigit() and int(length) > limit:
        return head, b""  # refused by its length
    if isinstance(plain, WSGIRequest) and length == "0" and "HTTP_TRANSFER_ENCODING" in plain.META:
        return head, refused_body(LengthRequiredError("Django drops a body without a length"))
    try:
        body: bytes = plain.body
        received = len(body)
    except RawPostDataException:
        head, body = _parsed_body(request, plain, head)
        # How much of it has arrived. Under ASGI, Django parses only whole bodies.
        received = getattr(plain._stream, "_pos", sys.maxsize)  # noqa: SLF001
    except UnreadablePostError as error:
        return head, refused_body(broken_off(error))
    if length.isdigit() and received < int(length):
        return head, refused_body(broken_off(f"{received} of {length} bytes"))
    return head, body


def _parsed_body(request: Any, plain: HttpRequest, head: RequestHead) -> tuple[RequestHead, bytes]:
    """Return a body that was parsed before the guard, e.g. to check a CSRF token: as JSON."""
    data = plain.POST if request is plain else request.data
    files = plain.FILES if request is plain else request.FILES
    if not hasattr(data, "lists"):  # parsed by REST framework, not a form
        body = json.dumps(data, default=str).encode()
        return with_header(head, b"content-type", b"application/json"), body
    fields = [(name, str(value)) for name, values in data.lists() for value in values]
    contents = [(name, file.name or "", file) for name, found in files.lists() for file in found]
    return parsed_form(head, fields, contents)


def _response_of(view: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the view and return its response, rendered. Errors of Django become responses too."""
    rest_view = getattr(request, "parser_context", {}).get("view")
    try:
        response = view(*args, **kwargs)
    except OncewardError:
        raise
    except Exception as error:
        refused = refusal_of(error)
        if refused is not None:
            raise refused from error
        if rest_view is not None:
            response = rest_view.handle_exception(error)  # raises what it does not handle
        elif isinstance(error, _HANDLED):
            response = response_for_exception(request, error)
        else:
            raise
    if rest_view is not None:
        response = rest_view.finalize_response(request, response, *args[1:], **kwargs)
    if getattr(response, "is_rendered", True) is False:
        response = response.render()
    return response


def _complete(response: Any, view: str, max_bytes: int) -> Any:
    """Read the content of a file, whose length is known. Raises for a stream, and for too much."""
    if not response.streaming:
        return response
    length = response.get("Content-Length", "")
    known = int(length) if length.isdigit() and not response.is_async else None
    check_file(known, max_bytes, view, partial(_close_files, response))
    plain = HttpResponse(b"".join(response.streaming_content), status=response.status_code)
    plain.headers, plain.cookies = response.headers, response.cookies
    # Closes the file when the response has been sent. Closing it now would end the request.
    plain._resource_closers = response._resource_closers  # noqa: SLF001
    return plain


def _close_files(response: Any) -> None:
    """Close what a response reads. Its ``close()`` would end the request, too."""
    for close in response._resource_closers:  # noqa: SLF001
        with suppress(Exception):
            close()


def _response_of_django(response: Any) -> Response:
    """Return a complete response, cookies included."""
    cookies = (("set-cookie", morsel.OutputString()) for morsel in response.cookies.values())
    headers = encoded_headers([*response.items(), *cookies])
    return Response(response.status_code, headers, bytes(response.content))


def django_response(served: Served) -> Any:
    """Return a reply as a response of Django."""
    if served.own is not None:
        return served.add_to_own()
    response = HttpResponse(served.body, status=served.status)
    del response["Content-Type"]
    for name, value in served.text_headers:
        if name == "set-cookie":  # several, where Django's headers have one of each name
            response.cookies[str(len(response.cookies))] = _Cookie(value)
        else:
            response[name] = value
    return response


class _Cookie(Morsel[str]):
    """A cookie that was formatted before, with attributes that Python may not know."""

    def __init__(self, text: str) -> None:
        super().__init__()
        name, _, value = text.partition(";")[0].partition("=")
        self.set(name, value, value)
        self._text = text

    def OutputString(self, attrs: Any = None) -> str:  # noqa: N802, ARG002 - a name of http.cookies
        return self._text


# -- routes ----------------------------------------------------------------------------------------

# A route as the patterns it is made of. Their text may depend on the language of the request.
_Route = tuple[Any, ...]
# For each resolver, the routes of views: of functions, and of actions of viewsets.
_routes: WeakKeyDictionary[Any, dict[tuple[int, str], list[_Route]]] = WeakKeyDictionary()


def _later_route(request: HttpRequest, action: str) -> str | None:
    """Return the route of a request, or None if it is the first one that leads to its view.

    The first one is None so that a route added to a view changes nothing for the routes before
    it. ``action`` is the name of the viewset's method.
    """
    found = request.resolver_match
    if found is None:
        return None
    resolver = urls.get_resolver(getattr(request, "urlconf", None))
    routes = _routes.get(resolver)
    if routes is None:
        routes = {}
        for route, callback in _walk(resolver, ()):
            # A viewset's: each route leads to some of its methods.
            actions = getattr(callback, "actions", None)
            names = sorted(set(actions.values())) if isinstance(actions, Mapping) else [""]
            for name in names:
                routes.setdefault((id(_view_of(callback)), name), []).append(route)
        _routes[resolver] = routes
    view = id(_view_of(found.func))
    same = routes.get((view, action)) or routes.get((view, "")) or []
    own: str = found.route
    return None if not same or own == _text(same[0]) else own


def _walk(resolver: Any, prefix: _Route) -> Iterator[tuple[_Route, Any]]:
    """Yield the routes of a resolver in the order in which they are tried, and their views."""
    for pattern in resolver.url_patterns:
        route = (*prefix, pattern.pattern)
        if hasattr(pattern, "url_patterns"):
            yield from _walk(pattern, route)
        else:
            yield route, pattern.callback


def _view_of(callback: Any) -> Any:
    """Return the class of a view, or its function without decorators."""
    for name in ("cls", "view_class"):  # before unwrap: as_view copies what dispatch wraps
        if isinstance(getattr(callback, name, None), type):
            return getattr(callback, name)
    return unwrap(callback)


def _text(route: _Route) -> str:
    """Return a route as ``ResolverMatch.route`` has it."""
    text = ""
    for part in map(str, reversed(route)):
        text = part + text.removeprefix("^") if part else text
    return text


# -- the batch endpoint ----------------------------------------------------------------------------

_MARK: Final = "_onceward_batch"


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
    environ: Environ = {**request.META, "wsgi.url_scheme": request.scheme}
    configured, urlconf = django_onceward(), urls.get_urlconf()
    try:
        served = SyncBatch(configured.bridge, configured.batch).serve(
            head_of(environ, "POST", request.path_info),
            environ,
            read=lambda _limit: bytes(request.body),
            find=partial(_find, getattr(request, "urlconf", None)),
            run=partial(_run_item, request),
        )
    finally:
        urls.set_urlconf(urlconf)  # each request sets its own
    response: HttpResponse = django_response(served)
    return response


# Each item is checked for CSRF, with the headers and cookies of the batch, and has its transaction.
vars(batch).update({"csrf_exempt": True, "_non_atomic_requests": _EveryDatabase(), _MARK: True})


def _batch_headers(request: HttpRequest) -> Headers:
    """Return the header that names the batch endpoint; none if the project has no route to it."""
    urlconf = getattr(request, "urlconf", None) or django_settings.ROOT_URLCONF
    look_up = _path_of_batch if isinstance(urlconf, str) else _path_of_batch.__wrapped__
    path = look_up(urlconf, urls.get_script_prefix())
    return () if path is None else (batch_header(path, django_onceward().batch.max_items),)


@cache
def _path_of_batch(urlconf: Any, _prefix: str) -> str | None:
    for view in urls.get_resolver(urlconf).reverse_dict:
        if getattr(view, _MARK, False):
            with suppress(urls.NoReverseMatch):
                return str(urls.reverse(view, urlconf=urlconf))
    return None


def _run_item(outer: HttpRequest, environ: Environ) -> Response:
    """Serve the request of an item by all of the project's middleware."""
    request = WSGIRequest(environ)
    if getattr(outer, "_dont_enforce_csrf_checks", False):  # of Django's test client
        request._dont_enforce_csrf_checks = True  # noqa: SLF001
    response: Any = _handler(tuple(django_settings.MIDDLEWARE)).get_response(request)
    try:
        return _response_of_django(response)
    finally:
        _close_files(response)
        for connection in connections.all(initialized_only=True):
            if connection.errors_occurred:  # as at the end of each request
                connection.close_if_unusable_or_obsolete()


@cache
def _handler(_middleware: tuple[str, ...]) -> WSGIHandler:
    """Return the project's middleware and views, also below an ASGI server."""
    return WSGIHandler()


def _find(urlconf: Any, method: str, path: str) -> Match | None:
    """Return the match of a request; None if it is not certain that a guard serves it."""
    try:
        found = urls.resolve(path, urlconf=urlconf)
    except Http404:
        return None
    for view in _candidates(found.func, method.lower()):
        given = guard_of(view)
        if given is not None:
            name = given.endpoint or f"{method} /{found.route}"
            return Match(name, django_onceward().bridge.guard_for(given, name).policy, {})
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
