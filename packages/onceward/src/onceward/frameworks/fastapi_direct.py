"""Calls simple routes of FastAPI without its request handler; responses are the same, to the byte.

FastAPI looks a route up, resolves its dependencies and serializes its response by walking through
descriptions of them, again for each request. For simple routes this is compiled once. A route is
simple if neither it nor its router nor the middleware between the guard and it can tell the
difference; all others are called as before, and a log line of level DEBUG says why. Requests
without a JSON body are left to FastAPI even on a simple route, and all requests in a version of
FastAPI that this was not tested with.

What is not valid is never reported from here: errors of parameters, bodies and responses are made
by FastAPI's own functions, and exceptions are handled by the app's own handlers.
"""

import copy
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from datetime import date, datetime
from decimal import Decimal
from email.message import Message as EmailMessage
from enum import Enum
from functools import cache, lru_cache, partial
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin
from uuid import UUID

import fastapi
from fastapi import params, routing
from fastapi._compat import Undefined
from fastapi.dependencies import models, utils
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.security import HTTPBearer
from fastapi.utils import is_body_allowed_for_status_code
from starlette._exception_handler import wrap_app_handling_exceptions
from starlette.concurrency import run_in_threadpool
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from onceward.frameworks.asgi import PreparedCall, Send, SendResponse
from onceward.frameworks.starlette import the_execution, the_principal, the_transaction
from onceward.guard.execution import Execution
from onceward.guard.request_body import LARGE_BODY_BYTES, Receive
from onceward.records import Response as StoredResponse

Scope = MutableMapping[str, Any]
FindDirectRoute = Callable[[Any], "DirectRoute | None"]

DIRECT_BYTES: Final = "onceward_direct_bytes"
"""A class of routes that overrides ``get_route_handler`` has this attribute if, for bodies of at
most so many bytes, its handler does what that of ``APIRoute`` does."""

# The first and the last version of FastAPI that the tests compare with; others may do something
# else. ``make test-min`` runs them with the first one.
_TESTED: Final = ((0, 132), (0, 162))
# Tools that measure FastAPI replace these by functions of their own.
_FUNCTIONS: Final = (
    *("get_request_handler", "request_response", "run_endpoint_function", "serialize_response"),
    "solve_dependencies",
)
_ROUTE_APP: Final = ("fastapi.routing", "request_response.<locals>.app")
# Set by FastAPI while it traces a request.
_TELEMETRY: Final = "fastapi.telemetry"
_RAISED: Final = "onceward.raised"
_OK: Final = 200

_CONSTANTS: Final = frozenset({str, int, bool, float, NoneType})
_SCALARS: Final = frozenset({str, int, bool, float, UUID, date, datetime, Decimal})
_JSON_HEADERS: Final = ((b"content-type", b"application/json"),)
_MAX_DEPTH: Final = 8
# Left out by ``jsonable_encoder``.
_SQLALCHEMY: Final = "_sa"

# As ``JSONResponse`` encodes.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

_log = logging.getLogger("onceward.request")


class _NotSimpleError(Exception):
    """Why a route is called by FastAPI."""


def find_direct_routes(app: Any, inner: Any) -> FindDirectRoute | None:
    """Return a function that finds the caller of a route, which is None if it is not simple.

    ``inner`` is what the guard is around in this app. Returns None if no route can be simple.
    """
    if not _is_tested(fastapi.__version__):
        return None
    reason = _why_none_is_simple(app, inner)
    if reason is not None:
        _log.debug("routes are called by FastAPI: %s", reason)
        return None
    found: dict[int, DirectRoute | None] = {}

    def find(route: Any) -> DirectRoute | None:
        # By identity: the table of guards holds the routes.
        if id(route) not in found:
            found[id(route)] = _compile(route, app, inner)
        return found[id(route)]

    return find


@cache  # so that the line is logged once
def _is_tested(version: str) -> bool:
    major, minor = version.split(".")[:2]
    first, last = _TESTED
    is_tested = first <= (int(major), int(minor)) <= last
    if not is_tested:
        _log.warning(
            "routes are called by FastAPI %s itself, because Onceward's faster way to call them "
            "was tested with %d.%d to %d.%d only; nothing else differs",
            *(version, *first, *last),
        )
    return is_tested


def _why_none_is_simple(app: Any, inner: Any) -> str | None:
    for name in _FUNCTIONS:
        function = getattr(routing, name, None)
        if not getattr(function, "__module__", "").startswith("fastapi.") or hasattr(
            function, "__wrapped__"
        ):
            return f"fastapi.routing.{name} was replaced by another function"
    if type(inner) is not ExceptionMiddleware or type(inner.app) is not AsyncExitStackMiddleware:
        return "there is other middleware inside the guard"
    router = inner.app.app
    if router is not app.router or type(router) is not routing.APIRouter:
        return "the app has its own kind of router"
    return None


def _compile(route: Any, app: Any, inner: ExceptionMiddleware) -> "DirectRoute | None":
    try:
        _check_earlier_routes(route, _all_routes(app.router.routes))
        return DirectRoute(route, app.router, inner)
    except _NotSimpleError as reason:
        _log.debug("%s is called by FastAPI: %s", route.path, reason)
        return None


# -- what is simple ------------------------------------------------------------------------------


def _all_routes(routes: Iterable[BaseRoute]) -> Iterator[Any]:
    """Iterate over all routes; newer FastAPI keeps those of included routers as a tree."""
    iterate = getattr(routing, "iter_route_contexts", None)
    yield from routes if iterate is None else iterate(routes)


def _original(route: Any) -> Any:
    """Return the route that a route of an included router was made from, or the route itself."""
    return getattr(route, "original_route", route)


def _check_earlier_routes(route: Any, routes: Iterable[Any]) -> None:
    """Raise if an earlier route may get requests that the table of guards has for this one."""
    for earlier in routes:
        original = _original(earlier)
        if original is _original(route) and earlier.path == route.path:
            return
        kind = type(original)
        if kind is Mount:
            if _may_match(original.path, route.path):
                raise _NotSimpleError(f"the app mounted at {original.path!r} comes before it")
        elif not (
            isinstance(original, Route) and kind.matches in {Route.matches, _APIRoute.matches}
        ) and not isinstance(original, WebSocketRoute):
            raise _NotSimpleError(f"a route of the type {kind.__name__} comes before it")
    raise _NotSimpleError("it is not a route of the app itself")


def _may_match(mounted: str, path: str) -> bool:
    """Return whether a request to the path of a route may be one to a mounted app."""
    fixed, has_parameter, _ = path.partition("{")
    prefix = mounted + "/"
    if "{" in prefix or prefix == "/":
        return True
    return (fixed + "/").startswith(prefix) or (bool(has_parameter) and prefix.startswith(fixed))


_APIRoute: Final = routing.APIRoute


def _bytes_up_to_which_simple(route: Any) -> int:
    """Return up to which size of the body the class of a route does what FastAPI's does."""
    original = _original(route)
    kind = type(original)
    if not isinstance(original, _APIRoute):
        raise _NotSimpleError("it is no route of FastAPI")
    for name in ("matches", "handle", "__call__"):
        if getattr(kind, name) is not getattr(_APIRoute, name):
            raise _NotSimpleError(f"{kind.__name__} overrides {name}")
    if (getattr(route.app, "__module__", ""), getattr(route.app, "__qualname__", "")) != _ROUTE_APP:
        raise _NotSimpleError("the app of the route was replaced")
    owner = next(each for each in kind.__mro__ if "get_route_handler" in vars(each))
    if owner is _APIRoute:
        return LARGE_BODY_BYTES
    declared = vars(owner).get(DIRECT_BYTES)
    if not isinstance(declared, int):
        raise _NotSimpleError(f"{owner.__name__} overrides get_route_handler")
    return min(declared, LARGE_BODY_BYTES)


def _is_kind(dependant: Any, kind: Literal["coroutine", "gen", "async_gen"]) -> bool:
    """Classify what a dependant calls as FastAPI does: by a property, or by a function."""
    found = getattr(dependant, f"is_{kind}_callable", None)
    return bool(getattr(models, f"_is_{kind}_callable")(dependant.call) if found is None else found)


def _is_constant(field: Any) -> bool:
    """Return whether the default of a field is always the same value, and not validated."""
    info = field.field_info
    return (
        info.default_factory is None
        and not info.validate_default
        and type(field.default) in _CONSTANTS
    )


def _is_one_value(field: Any) -> bool:
    """Return whether a parameter is one text; FastAPI reads lists, models and several aliases."""
    info = field.field_info
    return (
        _is_scalar(info.annotation)
        and not any(type(each).__name__ == "Json" for each in info.metadata)
        and info.validation_alias in {None, field.alias}
        and not getattr(field, "config", None)
        and field.alias.isascii()
        and (info.is_required() or _is_constant(field))
    )


def _is_scalar(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin in {Union, UnionType}:
        return all(each is NoneType or _is_scalar(each) for each in get_args(annotation))
    if origin is Literal:
        return True
    return annotation in _SCALARS or (isinstance(annotation, type) and issubclass(annotation, Enum))


@lru_cache(maxsize=256)
def _is_json(content_type: str) -> bool:
    """Check a content type as FastAPI does."""
    message = EmailMessage()
    message["content-type"] = content_type
    if message.get_content_maintype() != "application":
        return False
    subtype = message.get_content_subtype()
    return subtype == "json" or subtype.endswith("+json")


def _is_documentation(dependant: Any) -> bool:
    """Return whether a dependency is there for the OpenAPI document only."""
    call = dependant.call
    return type(call) is HTTPBearer and not call.auto_error and dependant.name is None


# -- parameters and dependencies -----------------------------------------------------------------


class _Param:
    """A parameter whose value is one text of the path, the query or the headers."""

    __slots__ = ("alias", "default", "field", "header", "is_required", "name")

    def __init__(self, field: Any) -> None:
        self.field = field
        self.name: str = field.name
        self.alias: str = field.alias
        self.header = self.alias.lower().encode("latin-1")
        self.is_required: bool = field.field_info.is_required()
        self.default = None if self.is_required else field.default

    def add(self, value: Any, values: dict[str, Any]) -> bool:
        """Add the value that was sent; return False if it is missing or not valid."""
        if value is None:
            if not self.is_required:
                values[self.name] = self.default
            return not self.is_required
        valid, errors = self.field.validate(value, values, loc=())
        if not errors:
            values[self.name] = valid
        return not errors


# What these dependencies return while a guarded request runs.
_OWN: Final[dict[Any, Callable[[Execution], Any]]] = {
    the_execution: lambda execution: execution,
    the_transaction: lambda execution: execution.transaction,
    the_principal: lambda execution: execution.request.principal,
}


class _Request:
    """One request, while it is served. Its ``Request`` is made when it is needed first."""

    __slots__ = ("cache", "execution", "made", "receive", "response", "scope")

    def __init__(self, scope: Scope, receive: Receive, execution: Execution) -> None:
        self.scope = scope
        self.receive = receive
        self.execution = execution
        self.made: Request | None = None
        # What dependencies have returned.
        self.cache: dict[Any, Any] = {}
        # In which dependencies and the handler set headers and status.
        self.response: Response | None = None

    def get(self) -> Request:
        """Return the same request to all who need it."""
        if self.made is None:
            self.made = Request(self.scope, self.receive)
        return self.made

    def get_response(self) -> Response:
        """Return the response that FastAPI would make for parameters of this type."""
        if self.response is None:
            self.response = Response()
            del self.response.headers["content-length"]
            self.response.status_code = None  # type: ignore[assignment]
        return self.response


class _Call:
    """A handler or a dependency, and where its arguments come from."""

    def __init__(self, dependant: Any, *, is_handler: bool = False) -> None:
        if dependant.websocket_param_name or dependant.background_tasks_param_name:
            raise _NotSimpleError("it uses background tasks or a websocket")
        if dependant.security_scopes_param_name or getattr(dependant, "own_oauth_scopes", None):
            raise _NotSimpleError("it uses security scopes")
        if dependant.http_connection_param_name:
            raise _NotSimpleError("it uses an HTTPConnection")
        if _is_kind(dependant, "gen") or _is_kind(dependant, "async_gen"):
            raise _NotSimpleError("a dependency has a yield")
        if dependant.body_params and not is_handler:
            raise _NotSimpleError("a dependency reads the body")
        self._dependant = dependant
        self.call: Callable[..., Any] = dependant.call
        self.name: str | None = dependant.name
        self.own = _OWN.get(self.call) if inspect.isfunction(self.call) else None
        self.is_async = _is_kind(dependant, "coroutine")
        self._key = self.call, getattr(dependant, "scope", None)
        self._is_cached: bool = dependant.use_cache
        # In the order in which they are called.
        self._needed = [
            _Call(each) for each in dependant.dependencies if not _is_documentation(each)
        ]
        fields = (*dependant.path_params, *dependant.query_params, *dependant.header_params)
        self._has_simple_params = not dependant.cookie_params and all(map(_is_one_value, fields))
        self._path = [_Param(field) for field in dependant.path_params]
        self._query = [_Param(field) for field in dependant.query_params]
        self._headers = [_Param(field) for field in dependant.header_params]
        self._request_name: str | None = dependant.request_param_name
        self._response_name: str | None = dependant.response_param_name
        # True if code of the app gets the request.
        self.needs_request: bool = bool(self._request_name) or any(
            each.own is None and each.needs_request for each in self._needed
        )

    async def arguments(self, request: _Request) -> tuple[dict[str, Any], list[Any]]:
        """Call the dependencies; return the arguments without the body, and the errors."""
        values: dict[str, Any] = {}
        errors: list[Any] = []
        for each in self._needed:
            if each.own is None:
                errors += await each.add_result(values, request)
            elif each.name is not None:
                values[each.name] = each.own(request.execution)
        if not self._has_simple_params or not self._add_valid(values, request):
            errors += self._add_any(values, request.get())
        return values, errors

    async def add_result(self, values: dict[str, Any], request: _Request) -> list[Any]:
        """Call this dependency and add what it returns; return its errors."""
        arguments, errors = await self.arguments(request)
        if errors:
            return errors
        self.add_objects(arguments, request)
        if self._is_cached and self._key in request.cache:
            solved = request.cache[self._key]
        else:
            solved = await self.result(arguments)
        request.cache.setdefault(self._key, solved)
        if self.name is not None:
            values[self.name] = solved
        return []

    async def result(self, arguments: dict[str, Any]) -> Any:
        """Call the function, one that is not async in a thread."""
        if self.is_async:
            return await self.call(**arguments)
        return await run_in_threadpool(self.call, **arguments)

    def _add_valid(self, values: dict[str, Any], request: _Request) -> bool:
        """Add the parameters; return False, and add none, if one is missing or not valid."""
        found: dict[str, Any] = {}
        scope = request.scope
        for param in self._path:
            if not param.add(scope["path_params"].get(param.alias), found):
                return False
        if self._query:
            query = request.get().query_params if scope.get("query_string") else {}
            for param in self._query:
                if not param.add(query.get(param.alias), found):
                    return False
        for param in self._headers:
            if not param.add(_header(scope, param.header), found):
                return False
        values.update(found)
        return True

    def _add_any(self, values: dict[str, Any], request: Request) -> list[Any]:
        """Add the parameters that are valid; return FastAPI's errors of the others."""
        errors: list[Any] = []
        for fields, sent in (
            (self._dependant.path_params, request.path_params),
            (self._dependant.query_params, request.query_params),
            (self._dependant.header_params, request.headers),
            (self._dependant.cookie_params, request.cookies),
        ):
            found, wrong = utils.request_params_to_args(fields, sent)
            values.update(found)
            errors += wrong
        return errors

    def add_objects(self, values: dict[str, Any], request: _Request) -> None:
        """Add request and response."""
        if self._request_name:
            values[self._request_name] = request.get()
        if self._response_name:
            values[self._response_name] = request.get_response()


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            text: str = value.decode("latin-1")
            return text
    return None


# -- the route -----------------------------------------------------------------------------------


class DirectRoute:
    """The caller of one route. Raises if the route is not simple."""

    def __init__(self, route: Any, router: Any, exceptions: ExceptionMiddleware) -> None:
        self._max_bytes = _bytes_up_to_which_simple(route)
        dependant = route.dependant
        if dependant.call is not route.endpoint:
            raise _NotSimpleError("the handler was replaced")
        if getattr(route, "stream_item_field", None) or getattr(route, "is_sse_stream", False):
            raise _NotSimpleError("it streams")
        self._call = _Call(dependant, is_handler=True)
        self._route = route
        self._methods = frozenset(route.methods)
        self._overrides = route.dependency_overrides_provider
        self._is_template = bool(route.param_convertors)
        self._has_body = route.body_field is not None
        self._body = self._simple_body()
        self._serializer = _Serializer(route, is_async=self._call.is_async)
        # Handles what is raised here, with the handlers of the app.
        self._exceptions = copy.copy(exceptions)
        self._exceptions.app = _raise_again
        # What routing sets.
        self._scope = {"router": router, "endpoint": route.endpoint, "route": _original(route)}
        context = getattr(route, "_route_context", None)
        if context is not None:
            self._scope["fastapi"] = {"effective_route_context": context}

    def _simple_body(self) -> Any:
        """Return the field of the whole body; None if FastAPI has to read it, or there is none."""
        route, fields = self._route, self._route.dependant.body_params
        if not self._has_body:
            return None
        if isinstance(route.body_field.field_info, params.Form):
            raise _NotSimpleError("it reads a form")
        if len(fields) != 1 or route._embed_body_fields:  # noqa: SLF001 - as FastAPI's handler
            return None
        info = fields[0].field_info
        if getattr(info, "embed", None) or not (info.is_required() or _is_constant(fields[0])):
            return None
        return fields[0]

    def prepare(self, scope: Scope, path: str, body: bytes) -> PreparedCall | None:
        """Return the call; None if this request is left to FastAPI."""
        if (
            len(body) > self._max_bytes
            or scope["method"] not in self._methods
            or _TELEMETRY in scope
            or (self._overrides is not None and self._overrides.dependency_overrides)
        ):
            return None
        path_params: dict[str, Any] = dict(scope.get("path_params", ()))
        if self._is_template:
            found = self._route.path_regex.match(path)
            if found is None:
                return None
            convertors = self._route.param_convertors
            for name, text in found.groupdict().items():
                path_params[name] = convertors[name].convert(text)
        elif path != self._route.path:
            return None
        content: Any = Undefined
        if self._has_body and body:
            content_type = _header(scope, b"content-type")
            if not content_type or not _is_json(content_type):
                return None
            try:
                content = json.loads(body)
            except (ValueError, RecursionError):
                return None
        scope.update(self._scope)
        scope["path_params"] = path_params
        return partial(self._serve, content)

    async def _serve(
        self, content: Any, scope: Scope, receive: Receive, execution: Execution
    ) -> StoredResponse | SendResponse:
        return await self.run(_Request(scope, receive, execution), content)

    async def run(self, request: _Request, content: Any) -> StoredResponse | SendResponse:
        """Call the handler with a decoded body; return its response, or what sends it."""
        try:
            response = await self._respond(request, content)
        except Exception as error:  # noqa: BLE001 - handled as it is by FastAPI, or raised again
            made = request.get()
            if self._has_body:
                await made.body()  # handlers may read it, as it was read before
            request.scope[_RAISED] = error, made
            return self._exceptions
        if isinstance(response, StoredResponse):
            request.execution.is_last = True
        return response

    async def _respond(self, request: _Request, content: Any) -> StoredResponse | Response:
        call = self._call
        if call.needs_request and self._has_body:
            await request.get().body()
        values, errors = await call.arguments(request)
        if self._body is None or not self._add_body(values, content):
            errors += await self._add_any_body(values, content)
        if errors:
            sent = None if content is Undefined else content
            context = self._context(request.scope)
            raise RequestValidationError(errors, body=sent, endpoint_ctx=context)
        call.add_objects(values, request)
        returned = await call.result(values)
        if isinstance(returned, Response):
            return _as_stored(returned)
        return await self._serializer.serialize(returned, request.response)

    def _add_body(self, values: dict[str, Any], content: Any) -> bool:
        field = self._body
        if content is Undefined:
            if field.field_info.is_required():
                return False
            values[field.name] = field.default
            return True
        valid, errors = field.validate(content, values, loc=("body",))
        if not errors:
            values[field.name] = valid
        return not errors

    async def _add_any_body(self, values: dict[str, Any], content: Any) -> list[Any]:
        fields = self._route.dependant.body_params
        if not fields:
            return []
        found, errors = await utils.request_body_to_args(
            body_fields=fields,
            received_body=content,
            embed_body_fields=self._route._embed_body_fields,  # noqa: SLF001
        )
        values.update(found)
        return errors

    def _context(self, scope: Scope) -> Any:
        """Return the place of the handler, which FastAPI adds to the text of an error for logs."""
        dependant = self._route.dependant
        context = routing._extract_endpoint_context(dependant.call)  # noqa: SLF001
        if dependant.path:
            root = scope.get("root_path", "").rstrip("/")
            context["path"] = f"{scope['method']} {root}{dependant.path}"
        return context


async def _raise_again(scope: Scope, receive: Receive, send: Send) -> None:
    """Raise what was raised, where FastAPI's own request handlers raise it."""
    error, request = scope.pop(_RAISED)

    async def raise_error(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise error

    await wrap_app_handling_exceptions(raise_error, request)(scope, receive, send)


# -- responses -----------------------------------------------------------------------------------


def _as_stored(response: Response) -> StoredResponse | Response:
    """Return a plain response as it is stored; others are sent by themselves."""
    if type(response).__call__ is not Response.__call__ or response.background is not None:
        return response
    headers = tuple([(name.lower(), value) for name, value in response.raw_headers])
    return StoredResponse(response.status_code, headers, bytes(response.body))


class _Serializer:
    """Makes the response of what a handler returns."""

    def __init__(self, route: Any, *, is_async: bool) -> None:
        response_class = route.response_class
        has_default_class = not isinstance(response_class, type)
        self._class: Any = response_class.value if has_default_class else response_class
        if not issubclass(self._class, Response) or issubclass(self._class, StreamingResponse):
            raise _NotSimpleError("its response class is not a plain one")
        self._has_model = route.response_field is not None
        # FastAPI encodes by the model, without the class of the response.
        self._is_dumped = self._has_model and has_default_class
        self._status: int | None = route.status_code
        self._is_plain = self._class is JSONResponse and is_body_allowed_for_status_code(
            self._status
        )
        self._endpoint = route.dependant.call
        self._options: dict[str, Any] = {
            "field": route.response_field,
            "include": route.response_model_include,
            "exclude": route.response_model_exclude,
            "by_alias": route.response_model_by_alias,
            "exclude_unset": route.response_model_exclude_unset,
            "exclude_defaults": route.response_model_exclude_defaults,
            "exclude_none": route.response_model_exclude_none,
            "is_coroutine": is_async,
            "dump_json": self._is_dumped,
        }

    async def serialize(self, returned: Any, own: Response | None) -> StoredResponse | Response:
        """Return the response; ``own`` has the headers and the status that the app has set."""
        status = (own.status_code if own is not None else None) or self._status
        content: Any
        if self._has_model or not _is_plain_json(returned, _MAX_DEPTH):
            content = await routing.serialize_response(
                response_content=returned,
                endpoint_ctx=routing._extract_endpoint_context(self._endpoint),  # noqa: SLF001
                **self._options,
            )
        else:
            content = returned
        if self._is_plain and is_body_allowed_for_status_code(status):
            body = content if self._is_dumped else _encode(content).encode()
            headers: tuple[tuple[bytes, bytes], ...] = _JSON_HEADERS
            if own is not None:
                headers += tuple([(n.lower(), v) for n, v in own.raw_headers])
            return StoredResponse(status or _OK, headers, body)
        options: dict[str, Any] = {} if status is None else {"status_code": status}
        if self._is_dumped:
            response = Response(content=content, media_type="application/json", **options)
        else:
            response = self._class(content, **options)
        if not is_body_allowed_for_status_code(response.status_code):
            response.body = b""
        if own is not None:
            response.headers.raw.extend(own.headers.raw)
        return _as_stored(response)


def _is_plain_json(value: Any, depth: int) -> bool:
    """Return whether ``jsonable_encoder`` would return an equal value."""
    kind = type(value)
    if kind in _CONSTANTS:
        return True
    if depth == 0:
        return False
    if kind is dict:
        return all(
            type(key) is str and not key.startswith(_SQLALCHEMY) and _is_plain_json(each, depth - 1)
            for key, each in value.items()
        )
    return kind is list and all(_is_plain_json(each, depth - 1) for each in value)
