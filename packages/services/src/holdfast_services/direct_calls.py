"""Calls the handlers of guarded routes without routing and dependencies of FastAPI.

The guard has found the route, read the body and signed the caller in before FastAPI begins, so most
of what FastAPI does for such a request has been done: its solver takes longer than a handler. Here
the arguments of each handler are worked out once. A request whose arguments are not valid is passed
on to FastAPI before the handler runs, so every error response is FastAPI's own.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, get_args, get_origin

from fastapi import Request, Response
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from starlette.convertors import StringConvertor

from holdfast import Execution
from holdfast.server.asgi import SCOPE_KEY
from holdfast.server.request_body import LARGE_BODY_BYTES
from holdfast.server.route_table import GuardedRoute
from holdfast.server.starlette import the_execution, the_principal, the_transaction

__all__ = ["DirectCall", "DirectCalls", "compile_direct_calls"]

Scope = MutableMapping[str, Any]
Headers = Iterable[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

# Other spellings of JSON are left to FastAPI.
_JSON: Final = frozenset(
    {
        b"application/json",
        b"application/json; charset=utf-8",
        b"application/json;charset=utf-8",
        b"application/json; charset=UTF-8",
    }
)
# What a handler gets in place of the three dependencies of Holdfast.
_PROVIDED: Final[dict[Any, Callable[[Execution], Any]]] = {
    the_execution: lambda execution: execution,
    the_transaction: lambda execution: execution.transaction,
    the_principal: lambda execution: execution.request.principal,
}


class _NotDirectError(Exception):
    """FastAPI has to serve this route, or this request."""


class DirectCall:
    """One route: works out the arguments of its handler and calls it."""

    def __init__(self, route: APIRoute) -> None:
        """Raise ``_NotDirectError`` if the handler needs what only FastAPI provides."""
        dependant = route.dependant
        if (
            dependant.query_params
            or dependant.cookie_params
            or dependant.http_connection_param_name
            or dependant.background_tasks_param_name
            or dependant.security_scopes_param_name
            or not inspect.iscoroutinefunction(route.endpoint)
        ):
            raise _NotDirectError
        # The guard has found the execution that the wrapper of a guarded handler looks for.
        self._handler: Callable[..., Awaitable[Any]] = inspect.unwrap(route.endpoint)
        self._provided = _provided(dependant)
        self._request_name: str | None = dependant.request_param_name
        self._response_name: str | None = dependant.response_param_name
        self._path_regex = route.path_regex if route.param_convertors else None
        if not all(isinstance(one, StringConvertor) for one in route.param_convertors.values()):
            raise _NotDirectError
        self._path_fields = [(field.name, field) for field in dependant.path_params]
        self._headers = _read_headers(dependant)
        self._body = _body_field(route)
        self._response_field = _response_field(route)
        self._status = route.status_code

    def arguments(self, execution: Execution, scope: Scope) -> dict[str, Any] | None:
        """Return the arguments of the handler; None if FastAPI has to say what is wrong."""
        values: dict[str, Any] = {name: get(execution) for name, get in self._provided}
        try:
            if self._body is not None:
                self._add_body(values, execution.request.body, scope["headers"])
            if self._path_regex is not None:
                self._add_path(values, execution.request.path)
            if self._headers:
                self._add_headers(values, scope["headers"])
        except _NotDirectError:
            return None
        return values

    def _add_body(self, values: dict[str, Any], body: bytes, headers: Headers) -> None:
        assert self._body is not None  # noqa: S101 - the caller has checked
        name, field, is_optional = self._body
        if not body and is_optional:  # the default of the handler's parameter
            return
        if not body or len(body) > LARGE_BODY_BYTES or not _is_json(headers):
            raise _NotDirectError
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise _NotDirectError from None
        values[name] = _valid(field, content)

    def _add_path(self, values: dict[str, Any], path: str) -> None:
        assert self._path_regex is not None  # noqa: S101 - the caller has checked
        found = self._path_regex.match(path)
        if found is None:
            raise _NotDirectError
        for name, field in self._path_fields:
            values[name] = _valid(field, found[field.alias])

    def _add_headers(self, values: dict[str, Any], headers: Headers) -> None:
        for name, field, header, is_list in self._headers:
            texts = [value.decode("latin-1") for key, value in headers if key == header]
            if texts:  # without it, the default of the handler's parameter
                values[name] = _valid(field, texts if is_list else texts[0])

    async def respond(self, values: dict[str, Any], request: Request) -> Response:
        """Call the handler and return its response."""
        if self._request_name is not None:
            values[self._request_name] = request
        if self._response_name is None:
            result = await self._handler(**values)
            if isinstance(result, Response):
                return result
            return self._render(result, self._status)
        changed = Response()
        del changed.headers["content-length"]
        # As FastAPI does: None unless the handler sets it.
        changed.status_code = None  # type: ignore[assignment]
        values[self._response_name] = changed
        result = await self._handler(**values)
        if isinstance(result, Response):
            return result
        response = self._render(result, changed.status_code or self._status)
        response.headers.raw.extend(changed.headers.raw)
        return response

    def _render(self, result: Any, status: int | None) -> Response:
        field, options = self._response_field
        value, errors = field.validate(result, {}, loc=("response",))
        if errors:
            raise TypeError(f"{self._handler.__qualname__} returned what it is not declared to")
        content = field.serialize_json(value, **options)
        return Response(content, status or 200, media_type="application/json")


def compile_direct_calls(
    guarded: Iterable[GuardedRoute], routes: Iterable[Any]
) -> dict[str, DirectCall]:
    """Return the calls by endpoint name, for the routes that can be called without FastAPI."""
    by_path: dict[tuple[str, str], APIRoute] = {}
    for route in routes:
        if isinstance(route, APIRoute):
            for method in route.methods or ():
                by_path.setdefault((method, route.path), route)
    calls: dict[str, DirectCall] = {}
    shared: set[str] = set()
    for one in guarded:
        found = by_path.get((one.method, one.path))
        if one.endpoint in calls:
            shared.add(one.endpoint)
        if found is None or one.guard.is_claimed_late:
            continue
        try:
            calls[one.endpoint] = DirectCall(found)
        except _NotDirectError:
            continue
    return {name: call for name, call in calls.items() if name not in shared}


class DirectCalls:
    """ASGI middleware inside the guard: calls a handler, or passes the request on to FastAPI."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        calls: Callable[[], Mapping[str, DirectCall]],
        exception_handlers: Mapping[Any, Callable[..., Any]],
    ) -> None:
        """``exception_handlers`` are those of the app; ``calls`` is called once."""
        self._app = app
        self._calls = calls()
        self._exception_handlers = exception_handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        execution = scope.get(SCOPE_KEY)
        if isinstance(execution, Execution):
            call = self._calls.get(execution.request.endpoint)
            # With telemetry of FastAPI, its spans are recorded by FastAPI.
            if call is not None and scope.get("fastapi.telemetry") is None:
                values = call.arguments(execution, scope)
                if values is not None:
                    request = Request(scope, receive)
                    try:
                        response = await call.respond(values, request)
                    except Exception as error:  # noqa: BLE001 - raised again without a handler
                        response = await self._handle(request, error)
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _handle(self, request: Request, error: Exception) -> Response:
        """Render an error as Starlette would, with the app's handlers; raises it without one."""
        for kind in type(error).__mro__:
            handler = self._exception_handlers.get(kind)
            if handler is not None:
                response: Response = await handler(request, error)
                return response
        raise error


def _provided(dependant: Any) -> list[tuple[str, Callable[[Execution], Any]]]:
    """Return the dependencies by parameter name; those of the OpenAPI document have no value."""
    provided = []
    for one in dependant.dependencies:
        if isinstance(one.call, SecurityBase) and one.name is None:
            continue
        get = _PROVIDED.get(one.call)
        if get is None or one.name is None:
            raise _NotDirectError
        provided.append((one.name, get))
    return provided


def _read_headers(dependant: Any) -> list[tuple[str, Any, bytes, bool]]:
    """Return the headers that a handler reads, by parameter name.

    Parameters that begin with an underscore are in the signature for the OpenAPI document.
    """
    read = []
    for field in dependant.header_params:
        if field.name.startswith("_"):
            continue
        if field.field_info.is_required():
            raise _NotDirectError
        name = field.alias.replace("_", "-").lower().encode("latin-1")
        read.append((field.name, field, name, _is_list(field.field_info.annotation)))
    return read


def _valid(field: Any, value: Any) -> Any:
    found, errors = field.validate(value, {}, loc=())
    if errors:
        raise _NotDirectError
    return found


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_is_list, get_args(annotation)))


def _body_field(route: APIRoute) -> tuple[str, Any, bool] | None:
    """Return name, field and whether the body is optional; None for a handler without a body."""
    fields = route.dependant.body_params
    if not fields:
        return None
    if len(fields) > 1 or route.body_field is not fields[0]:
        raise _NotDirectError
    return fields[0].name, fields[0], not fields[0].field_info.is_required()


def _response_field(route: APIRoute) -> tuple[Any, dict[str, Any]]:
    """Return what encodes the result of a handler, and its options."""
    field = route.response_field
    if field is None:
        declared = inspect.signature(inspect.unwrap(route.endpoint)).return_annotation
        if not (isinstance(declared, type) and issubclass(declared, Response)):
            raise _NotDirectError
        return None, {}
    if not hasattr(field, "serialize_json") or hasattr(route.response_class, "render"):
        raise _NotDirectError
    return field, {
        "include": route.response_model_include,
        "exclude": route.response_model_exclude,
        "by_alias": route.response_model_by_alias,
        "exclude_unset": route.response_model_exclude_unset,
        "exclude_defaults": route.response_model_exclude_defaults,
        "exclude_none": route.response_model_exclude_none,
    }


def _is_json(headers: Headers) -> bool:
    """Return whether the first Content-Type is one of the usual spellings of JSON."""
    for name, value in headers:
        if name == b"content-type":
            return value in _JSON
    return False
