"""Django: ``@guard(…)`` decides around the view, after middleware, decorators and permissions.

The guard is a ``transaction.atomic()`` of the project's database around the view.

::

    @login_required
    @guard("orders.create")
    def create_order(request): …

    class OrderViewSet(ModelViewSet):
        @guard("orders.create")
        def create(self, request): …
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

from onceward_protocol.extras import needs_extra

with needs_extra("django"):
    from django.conf import settings as django_settings
    from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
    from django.core.handlers.exception import response_for_exception
    from django.core.signals import setting_changed
    from django.db import connections
    from django.http import Http404, HttpRequest, HttpResponse, RawPostDataException
    from django.http.multipartparser import MultiPartParserError
    from django.http.response import HttpResponseBase
    from django.urls import NoReverseMatch, get_resolver, get_script_prefix, reverse
    from django.utils.module_loading import import_string

from onceward.app import Onceward
from onceward.batch.options import BatchOptions, batch_header
from onceward.config import GuardConfig
from onceward.errors import (
    ConfigurationError,
    NotAuthenticatedError,
    OncewardError,
    RequestError,
    ResponseTooLargeError,
    StoreUnavailableError,
    StreamingResponseError,
    UsageError,
)
from onceward.frameworks.sync_bridge import (
    Bridge,
    Served,
    SyncExecution,
    SyncRequest,
    batch_options,
)
from onceward.frameworks.views import (
    EndpointNames,
    check_endpoint,
    check_policy,
    check_rate_limit,
    name_of_view,
    no_caller,
    refuse_coroutine,
    refuse_generator,
    with_route,
)
from onceward.frameworks.wsgi import head_of, incomplete_body, parsed_form, with_content_type
from onceward.guard.pipeline import ADDED_HEADERS
from onceward.guard.policy import Policy
from onceward.guard.request import Headers, Principal, RequestHead
from onceward.guard.request_thread import has_request_thread, run_in_request_thread
from onceward.guard.route_table import SAFE_METHODS, Guard, Match, guard_of, mark_guarded
from onceward.records import Response
from onceward.stores.errors import unstorable_error
from onceward.stores.sessions.django import DjangoStore

__all__ = [
    "OncewardMiddleware",
    "batch_headers",
    "django_onceward",
    "django_response",
    "execution",
    "guard",
    "later_route",
    "mark_batch_view",
    "options_of_batch",
    "policy_of_guard",
    "response_of_django",
    "user_principal",
]


View = TypeVar("View", bound=Callable[..., Any])
# Takes the request, of Django REST framework where the view is one of its views.
GetPrincipal = Callable[[Any], Principal]

_WRITING_HANDLERS: Final = ("post", "put", "patch", "delete")
_WRITING_ACTIONS: Final = ("create", "update", "partial_update", "destroy")
# Django turns these into responses outside the view, where the guard could not store them.
_HANDLED: Final = (
    Http404,
    PermissionDenied,
    BadRequest,
    SuspiciousOperation,
    MultiPartParserError,
)

# Keys of settings.ONCEWARD that are options of the store.
_OF_STORE: Final = (
    *("table_prefix", "schema"),
    *("claim_seconds", "statement_seconds", "commit_seconds"),
)
# And those of ``GuardConfig``; the others are those of ``Onceward``.
_OF_CONFIG: Final = frozenset(option.name for option in fields(GuardConfig))
# In the guard of a view without a policy: that of the settings counts.
_NO_POLICY: Final = Policy()


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


class _DjangoOnceward:
    """Onceward on the project's database, one per process."""

    def __init__(self) -> None:
        given: Mapping[str, Any] = getattr(django_settings, "ONCEWARD", {})
        options = {str(name).lower(): value for name, value in given.items()}
        for name in ("identify", "principal", "tenants", "error_format", "policy"):
            if isinstance(options.get(name), str):
                try:
                    options[name] = import_string(options[name])
                except ImportError as error:
                    raise ConfigurationError(
                        f'settings.ONCEWARD["{name.upper()}"]: {error}'
                    ) from error
        try:
            check_policy(options.get("policy"))
        except ConfigurationError as error:
            raise ConfigurationError(f'settings.ONCEWARD["POLICY"]: {error}') from error
        self.using: str = options.pop("using", "default")
        if self.using not in django_settings.DATABASES:
            raise ConfigurationError(
                f'settings.ONCEWARD["USING"]: there is no database {self.using!r} in '
                f"settings.DATABASES, which has {', '.join(django_settings.DATABASES)}"
            )
        self.principal: GetPrincipal | None = options.pop("principal", None)
        options.pop("batch", None)  # of the batch view
        if self.principal is not None and options.get("tenants") is not None:
            raise ConfigurationError(
                'settings.ONCEWARD: "PRINCIPAL" says who callers are, but "TENANTS" that they are '
                "not kept apart: give one of them"
            )
        of_store = {name: options.pop(name) for name in _OF_STORE if name in options}
        try:
            self.store = DjangoStore(self._run_in_thread, using=self.using, **of_store)
        except ConfigurationError as error:
            raise ConfigurationError(f"settings.ONCEWARD: {error}") from error
        # A sweep here would need its own thread and connection: sweep with manage.py or a worker.
        # Records in memory would outlive a test's transaction, which Django rolls back.
        options = {"sweep_every_seconds": None, "memory_bytes": 0} | options
        rare = {name: options.pop(name) for name in _OF_CONFIG & options.keys()}
        try:
            self.onceward = Onceward(self.store, config=GuardConfig(**rare), **options)
        except TypeError as error:
            raise ConfigurationError(f"settings.ONCEWARD: {error}") from error
        self.bridge = Bridge(self.onceward)
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


class OncewardMiddleware:
    """Optional: turns Onceward's errors into responses in views that are not guarded."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Serve one Django request."""
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Respond with a Onceward error that a view raised."""
        error = unstorable_error(error) or error
        if not isinstance(error, RequestError | StoreUnavailableError):
            return None
        head = head_of(request.META, request.method or "GET", request.path_info)
        return django_response(django_onceward().bridge.refuse(error, head))


class _ViewGuard:
    """One ``guard(…)``."""

    def __init__(
        self, endpoint: str | None, policy: Policy | None, principal: GetPrincipal | None
    ) -> None:
        self._endpoint = endpoint
        self._policy = policy
        self._principal = principal
        self._resolved: tuple[_DjangoOnceward, Policy] | None = None
        # One guard for all handlers of a class: its name is the prefix of those of the actions.
        self._is_of_class = False

    # -- what can be guarded ------------------------------------------------------------------

    def wrap(self, view: Any) -> Any:
        """Return the guarded function, or the class with its writing handlers guarded."""
        if isinstance(view, type):
            return self._wrap_class(view)
        if hasattr(view, "view_class") or hasattr(view, "cls"):
            raise ConfigurationError(
                f"guard is above as_view() or @api_view of {view.__module__}.{view.__name__}, "
                "where it would decide before the view has authenticated its caller: put @guard "
                "below @api_view, or on the class or its methods"
            )
        refuse_coroutine(view)
        refuse_generator(view)
        if not isinstance(view, partial):  # method_decorator makes one for each request
            name_of_view(view)  # refuses handlers of GET

        @wraps(view)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self._call(view, args, kwargs)

        mark_guarded(guarded, Guard(self._policy or _NO_POLICY, self._endpoint))
        return _non_atomic(guarded)

    def _wrap_class(self, view: type) -> type:
        found = [
            name
            for name in (*_WRITING_HANDLERS, *_WRITING_ACTIONS, *_extra_actions(view))
            if callable(getattr(view, name, None))
        ]
        if not found:
            raise ConfigurationError(
                f"{view.__module__}.{view.__qualname__} is guarded, but has no handler of POST, "
                "PUT, PATCH or DELETE"
            )
        inherited = getattr(view, "dispatch", None)
        if inherited is None:
            raise ConfigurationError(
                f"{view.__module__}.{view.__qualname__} is guarded, but is no view: guard a "
                "function, or a class that derives from Django's View or from APIView"
            )
        self._is_of_class = True
        for name in found:
            setattr(view, name, self.wrap(getattr(view, name)))

        @wraps(inherited)
        def dispatch(instance: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            self._guard_handler(instance, request)
            return inherited(instance, request, *args, **kwargs)

        mark_guarded(dispatch, Guard(self._policy or _NO_POLICY, self._endpoint))
        setattr(view, "dispatch", _non_atomic(dispatch))  # noqa: B010
        return view

    # -- one request --------------------------------------------------------------------------

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
        self._guard_handler(instance, request)
        return view(*args, **kwargs)

    def _guard_handler(self, instance: Any, request: Any) -> None:
        """Guard what ``dispatch`` will call, unless it is guarded.

        A handler of a guarded class is not, if a subclass has overridden or added it.
        """
        name = request.method.lower()
        handler = getattr(instance, name, None)
        if handler is None or request.method in SAFE_METHODS or guard_of(handler) is not None:
            return
        if iscoroutinefunction(handler):
            raise _async_view(name_of_view(handler, type(instance)))
        setattr(instance, name, wraps(handler)(partial(self._handler, handler, instance)))

    def _handler(self, handler: Any, instance: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
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
        action = _action_of(instance, plain)
        endpoint = self._endpoint
        if endpoint is not None:
            if self._is_of_class and action:
                endpoint = f"{endpoint}.{action}"
            configured.names.add(
                endpoint, name.rpartition(".")[0] if owner and self._is_of_class else name
            )
        policy = self._policy_of(configured, name)
        own: list[Any] = []

        def handle() -> Response:
            response = _response_of(view, request, args, kwargs)
            if not isinstance(response, HttpResponseBase):
                raise _no_response(response, name)
            response = _complete(response, name, policy.max_response_bytes)
            own.append(response)
            return response_of_django(response)

        head, body = _head_and_body(request, plain, policy.max_body_bytes)
        served = configured.bridge.serve(
            SyncRequest(
                head=head,
                match=Match(
                    endpoint or _method_and_route(plain, name),
                    policy,
                    with_route(
                        _path_params(plain, kwargs),
                        None if endpoint is None else later_route(plain, action),
                    ),
                ),
                body=body,
                handle=handle,
                principal=self._principal_of(configured, request),
                added_headers=batch_headers(plain),
            )
        )
        return django_response(served, own[-1] if served.is_own else None)

    def _policy_of(self, configured: _DjangoOnceward, view: str) -> Policy:
        """Return the policy, with the defaults of the settings. Looked up once."""
        if self._resolved is None or self._resolved[0] is not configured:
            policy = configured.onceward.runtime.policy_or_default(self._policy)
            check_rate_limit(configured.onceward.runtime.config.limiter, policy, view)
            self._resolved = (configured, policy)
        return self._resolved[1]

    def _principal_of(
        self, configured: _DjangoOnceward, request: Any
    ) -> Callable[[], Principal] | None:
        chosen = self._principal or configured.principal
        if chosen is None:
            if configured.onceward.runtime.callers.has_identify:
                return None
            if not hasattr(request, "user"):
                raise _no_caller(f"{request.method} {request.path} is guarded")
            chosen = user_principal
        return partial(chosen, request)


def policy_of_guard(guard: Guard) -> Policy:
    """Return the policy of a guarded view, with the defaults of the settings."""
    given = None if guard.policy is _NO_POLICY else guard.policy
    return django_onceward().onceward.runtime.policy_or_default(given)


def _has_caller() -> bool:
    """Whether the settings say who the caller is; True if that is only known with a request."""
    if not django_settings.configured:
        return True
    if {"IDENTIFY", "PRINCIPAL", "TENANTS"} & {
        str(name).upper() for name in getattr(django_settings, "ONCEWARD", {})
    }:
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


def _extra_actions(view: type) -> list[str]:
    """Return the methods of a viewset with ``@action`` that write."""
    found: set[str] = set()
    for name in dir(view):
        methods = getattr(getattr(view, name, None), "mapping", None)
        if isinstance(methods, Mapping):
            found |= {methods[method] for method in _WRITING_HANDLERS if method in methods}
    return sorted(found)


def _non_atomic(view: Any) -> Any:
    """Exclude a view from ``ATOMIC_REQUESTS``: the guard begins the transaction."""
    view._non_atomic_requests = _NonAtomic(getattr(view, "_non_atomic_requests", ()))  # noqa: SLF001
    return view


class _NonAtomic(set[str]):
    """Databases that are excluded, and Onceward's: its alias is looked up when it is needed."""

    def __contains__(self, alias: object) -> bool:
        return super().__contains__(alias) or alias == django_onceward().using


def _path_params(request: HttpRequest, kwargs: dict[str, Any]) -> dict[str, str]:
    found = request.resolver_match
    args = () if found is None else found.args
    params = {key: str(value) for key, value in kwargs.items()}
    return params | {f"arg{index}": str(value) for index, value in enumerate(args)}


def _method_and_route(request: HttpRequest, name: str) -> str:
    """Return the name of a guard without one."""
    found = request.resolver_match
    return f"{request.method} {name if found is None else f'/{found.route}'}"


def _action_of(instance: Any, request: HttpRequest) -> str:
    """Return the name of the viewset's method that serves a request; empty for other views."""
    actions = getattr(instance, "action_map", None)
    return str(actions.get((request.method or "").lower(), "")) if actions else ""


def _response_of(view: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the view and return its response, rendered. Errors of Django become responses too."""
    rest_view = getattr(request, "parser_context", {}).get("view")
    try:
        response = view(*args, **kwargs)
    except OncewardError:
        raise
    except Exception as error:
        refused = unstorable_error(error)
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


def _no_response(returned: Any, view: str) -> UsageError:
    if iscoroutine(returned):
        returned.close()
        return _async_view(view)
    return UsageError(f"the guarded view {view} must return an HttpResponse, not {returned!r}")


def _async_view(view: str) -> ConfigurationError:
    return ConfigurationError(
        f"{view} is async, but its transaction belongs to a thread: make it a plain def"
    )


def _complete(response: Any, view: str, max_bytes: int) -> Any:
    """Read the content of a file, whose length is known. Raises for a stream, and for too much."""
    if not response.streaming:
        return response
    length = response.get("Content-Length", "")
    if not length.isdigit() or response.is_async or int(length) > max_bytes:
        for close_file in response._resource_closers:  # noqa: SLF001 - close() would end the request
            close_file()
    if not length.isdigit() or response.is_async:
        raise StreamingResponseError(
            f"the guarded view {view} streams its response, which is stored with the transaction "
            "and must be complete: return a plain HttpResponse"
        )
    if int(length) > max_bytes:
        raise ResponseTooLargeError(
            f"the guarded view {view} sent a file of more than {max_bytes} bytes, which cannot be "
            "stored for a replay: respond with a link to it"
        )
    plain = HttpResponse(b"".join(response.streaming_content), status=response.status_code)
    plain.headers, plain.cookies = response.headers, response.cookies
    # Closes the file when the response has been sent. Closing it now would end the request.
    plain._resource_closers = response._resource_closers  # noqa: SLF001
    return plain


def response_of_django(response: Any) -> Response:
    """Return a complete response, cookies included."""
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.items()
    ]
    headers += [
        (b"set-cookie", morsel.OutputString().encode("latin-1"))
        for morsel in response.cookies.values()
    ]
    return Response(response.status_code, tuple(headers), bytes(response.content))


def django_response(served: Served, own: Any = None) -> Any:
    """Return what was served as a response of Django; ``own`` is that of the view."""
    if own is not None:
        for name, value in served.headers:
            if name in ADDED_HEADERS:
                own[name.decode("latin-1")] = value.decode("latin-1")
        return own
    response = HttpResponse(served.body, status=served.status)
    del response["Content-Type"]
    for name, value in served.headers:
        if name == b"set-cookie":  # several, where Django's headers have one of each name
            response.cookies[str(len(response.cookies))] = _Cookie(value.decode("latin-1"))
        else:
            response[name.decode("latin-1")] = value.decode("latin-1")
    return response


class _Cookie(Morsel[str]):
    """A cookie that was formatted before, with attributes that Python may not know."""

    def __init__(self, text: str) -> None:
        super().__init__()
        name, _, value = text.partition(";")[0].partition("=")
        self.set(name, value, value)
        self._text = text

    def OutputString(self, attrs: Any = None) -> str:  # noqa: N802, ARG002 - a name of http.cookies
        """Return what follows ``Set-Cookie:``."""
        return self._text


def _head_and_body(
    request: Any, plain: HttpRequest, limit: int
) -> tuple[RequestHead, bytes | Callable[[], bytes]]:
    """Return the head of the request, and its body.

    In place of a body that broke off, a function that raises ``BodyInvalidError``.
    """
    head = head_of(plain.META, plain.method or "GET", plain.path_info)
    length = plain.META.get("CONTENT_LENGTH") or "0"
    if length.isdigit() and int(length) > limit:
        return head, b""  # refused by its length
    try:
        body: bytes = plain.body
    except RawPostDataException:
        return _parsed_body(request, plain, head)
    if length.isdigit() and len(body) < int(length):
        return head, partial(_refuse_incomplete, len(body), int(length))
    return head, body


def _refuse_incomplete(received: int, declared: int) -> bytes:
    raise incomplete_body(received, declared)


def _parsed_body(request: Any, plain: HttpRequest, head: RequestHead) -> tuple[RequestHead, bytes]:
    """Return a body that was parsed before the guard, e.g. to check a CSRF token: as JSON."""
    data = plain.POST if request is plain else request.data
    files = plain.FILES if request is plain else request.FILES
    if not hasattr(data, "lists"):  # parsed by REST framework, not a form
        return with_content_type(head, b"application/json"), json.dumps(data, default=str).encode()
    fields = [(name, str(value)) for name, values in data.lists() for value in values]
    contents = [(name, file.name or "", file) for name, found in files.lists() for file in found]
    return with_content_type(head, b"application/x-www-form-urlencoded"), parsed_form(
        fields, contents
    )


# A route as the patterns it is made of. Their text may depend on the language of the request.
_Route = tuple[Any, ...]
# For each resolver, the routes of views: of functions, and of actions of viewsets.
_routes: WeakKeyDictionary[Any, dict[tuple[int, str], list[_Route]]] = WeakKeyDictionary()


def later_route(request: HttpRequest, action: str) -> str | None:
    """Return the route of a request, or None if it is the first one that leads to its view.

    The first one is None so that a route added to a view changes nothing for the routes before
    it. ``action`` is the name of the viewset's method.
    """
    found = request.resolver_match
    if found is None:
        return None
    resolver = get_resolver(getattr(request, "urlconf", None))
    routes = _routes.get(resolver)
    if routes is None:
        routes = {}
        for route, callback in _walk(resolver, ()):
            for key in _keys(callback):
                routes.setdefault(key, []).append(route)
        _routes[resolver] = routes
    view = _view_of(found.func)
    same = routes.get((id(view), action)) or routes.get((id(view), "")) or []
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


def _keys(callback: Any) -> list[tuple[int, str]]:
    view, actions = id(_view_of(callback)), getattr(callback, "actions", None)
    if isinstance(actions, Mapping):  # a viewset's: each route leads to some of its methods
        return [(view, action) for action in sorted(set(actions.values()))]
    return [(view, "")]


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


_MARK = "_onceward_batch"


def mark_batch_view(view: Callable[..., Any]) -> None:
    """Let ``batch_headers`` find the routes to this view."""
    setattr(view, _MARK, True)


def batch_headers(request: HttpRequest) -> Headers:
    """Return the header that names the batch endpoint; none if the project has no route to it."""
    urlconf = getattr(request, "urlconf", None) or django_settings.ROOT_URLCONF
    look_up = _path_of_batch if isinstance(urlconf, str) else _path_of_batch.__wrapped__
    path = look_up(urlconf, get_script_prefix())
    return () if path is None else (batch_header(path, options_of_batch().max_items),)


def options_of_batch() -> BatchOptions:
    """Return ``settings.ONCEWARD["BATCH"]``."""
    given: Mapping[str, Any] = getattr(django_settings, "ONCEWARD", {})
    return batch_options(given.get("BATCH")) or BatchOptions()


@cache
def _path_of_batch(urlconf: Any, _prefix: str) -> str | None:
    for view in get_resolver(urlconf).reverse_dict:
        if getattr(view, _MARK, False):
            with suppress(NoReverseMatch):
                return str(reverse(view, urlconf=urlconf))
    return None
