"""Checks shared by the guards of all frameworks: names, and handlers that cannot be guarded."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from onceward.errors import ConfigurationError, StreamingResponseError
from onceward.guard.execution import find_execution
from onceward.guard.policy import Policy
from onceward.guard.route_table import ROUTE_PARAM, SAFE_METHODS

# Handlers of class-based views for methods that must not write.
_SAFE_HANDLERS: Final = frozenset({"get", "head", "options", "trace", "list", "retrieve"})


class EndpointNames:
    """The names given to guards: two views with one name would replay each other's responses."""

    def __init__(self) -> None:
        self._views: dict[str, str] = {}

    def add(self, endpoint: str, view: str) -> None:
        """Register the name of a view. Raises ``ConfigurationError`` if another view has it."""
        other = self._views.setdefault(endpoint, view)
        if other != view:
            raise ConfigurationError(
                f"{view} and {other} are both guarded as {endpoint!r}, and would replay each "
                "other's responses: give each its own name"
            )


def check_endpoint(endpoint: object) -> None:
    """Raise ``ConfigurationError`` for ``@guard`` without parentheses and for an empty name."""
    if callable(endpoint):
        raise ConfigurationError("write @guard() with parentheses, or @guard('orders.create')")
    if endpoint is not None and (not isinstance(endpoint, str) or not endpoint):
        raise ConfigurationError(f"the name of a guard must be text, not {endpoint!r}")


def check_policy(policy: object) -> None:
    """Raise ``ConfigurationError`` for a policy that is not a ``Policy``."""
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigurationError(
            f"policy must be a Policy, e.g. policy=Policy(key_required=False), not {policy!r}"
        )


def no_caller(what: str, fix: str, single_tenant: str) -> ConfigurationError:
    """Return the refusal of ``what``, a clause, with the two ways to say who the caller is."""
    return ConfigurationError(
        f"{what}, but nothing says who the caller is, and keys belong to callers: "
        f"write {fix}, or, if all callers may get each other's responses, {single_tenant}"
    )


def name_of_view(view: Any, owner: type | None = None) -> str:
    """Return a view's import path. Raises ``ConfigurationError`` for a handler of GET."""
    name = getattr(view, "__name__", type(view).__name__)
    qualname = getattr(view, "__qualname__", name)
    scope = qualname.rpartition(".")[0]
    is_method = owner is not None or (scope != "" and not scope.endswith("<locals>"))
    if owner is not None:
        path = f"{owner.__module__}.{owner.__qualname__}.{name}"
    else:
        path = f"{getattr(view, '__module__', '?')}.{qualname}"
        if qualname.rpartition(".")[2] != name:  # as Flask names the function of a class
            path += f" ({name})"
    if is_method and name in _SAFE_HANDLERS:
        raise ConfigurationError(
            f"{path} is guarded, but it serves GET, which must not write: guard the handlers of "
            "POST, PUT, PATCH or DELETE"
        )
    return path


def with_route(path_params: dict[str, str], route: str | None) -> dict[str, str]:
    """Add the route to what is compared, where one name covers several: another path is a 409."""
    return path_params if route is None else {**path_params, ROUTE_PARAM: route}


_WSGI_PARAMETERS = 2  # environ, start_response


def refuse_unguarded(handler: Any) -> Any:
    """Wrap a handler so that it raises ``ConfigurationError`` outside a guarded request.

    Without this, a handler of an app on which Onceward is not installed would run unguarded.
    """
    if inspect.isclass(handler):
        dispatch = getattr(handler, "dispatch", None)  # Starlette's HTTPEndpoint
        if dispatch is None:
            return handler

        @wraps(dispatch)
        async def guarded_dispatch(self: Any) -> None:
            method = self.scope["method"].upper()
            if method not in SAFE_METHODS and hasattr(self, method.lower()):
                check_is_guarded(handler)
            await dispatch(self)

        return type(
            handler.__name__,
            (handler,),
            {
                "dispatch": guarded_dispatch,
                "__module__": handler.__module__,
                "__qualname__": handler.__qualname__,
                "__wrapped__": handler,
            },
        )
    refuse_generator(handler)

    @wraps(handler)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        check_is_guarded(handler)
        return await handler(*args, **kwargs)

    @wraps(handler)
    def guarded_sync(*args: Any, **kwargs: Any) -> Any:
        check_is_guarded(handler)
        return handler(*args, **kwargs)

    is_async = inspect.iscoroutinefunction(handler)
    if not is_async and not inspect.isroutine(handler):
        return handler
    chosen: Any = guarded if is_async else guarded_sync
    chosen.__signature__ = signature_of(handler)
    return chosen


def refuse_generator(handler: Any) -> None:
    """Raise ``StreamingResponseError`` for a handler with a ``yield``, which frameworks stream."""
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise StreamingResponseError(
            f"{handler.__module__}.{handler.__qualname__} is guarded and has a yield, so its "
            "response would be streamed. The response of a guarded operation is stored with the "
            "transaction and must be complete: return it"
        )


def signature_of(handler: Callable[..., Any]) -> inspect.Signature:
    """Return the signature with annotations that are no strings, if they can be evaluated.

    The wrapper is in another module, where the names of the handler's module are not known.
    """
    try:
        return inspect.signature(handler, eval_str=True)
    except Exception:  # noqa: BLE001 - what an annotation raises; frameworks try again
        return inspect.signature(handler)


def check_is_guarded(handler: Callable[..., Any]) -> None:
    """Raise ``ConfigurationError`` unless a guarded request is being served."""
    execution = find_execution()
    if execution is None or execution.ended:
        raise ConfigurationError(
            f"{handler.__module__}.{handler.__qualname__} is guarded, but its request did not pass "
            "through Onceward, so it was not run: write onceward.install(app) for the app that "
            "serves it, or serve onceward.wrap(app). To call the function alone, e.g. in a unit "
            f"test, use {handler.__name__}.__wrapped__. A view of Flask or Django is guarded by "
            "FlaskGuard of onceward.flask or guard of onceward.django instead"
        )


def refuse_wsgi_app(app: Any) -> None:
    """Raise ``ConfigurationError`` for a WSGI app, where an ASGI app is needed."""
    if hasattr(app, "wsgi_app"):
        fix = "it is a Flask app: write guard = FlaskGuard(onceward, app), and @guard(…) on views"
    elif type(app).__module__.startswith("django.core.handlers.wsgi"):
        fix = "it is a Django project: write @guard(…) of onceward.django on views"
    elif _is_wsgi(app):
        fix = "it is a WSGI app: serve WsgiGuard(app, onceward) of onceward.frameworks.wsgi"
    else:
        return
    raise ConfigurationError(f"{app!r} is not an ASGI app; {fix}")


def _is_wsgi(app: Any) -> bool:
    try:
        parameters = inspect.signature(app).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = {parameter.kind for parameter in parameters}
    is_plain = kinds <= {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return is_plain and len(parameters) == _WSGI_PARAMETERS
