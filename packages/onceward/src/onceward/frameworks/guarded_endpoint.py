"""Wraps guarded handlers: none runs unguarded, and late ones claim their key when called."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from onceward.errors import ConfigurationError, StreamingResponseError
from onceward.guard.execution import find_execution
from onceward.guard.route_table import SAFE_METHODS

__all__ = [
    "check_is_guarded",
    "refuse_generator",
    "refuse_unguarded",
    "refuse_wsgi_app",
    "signature_of",
]

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
    if inspect.iscoroutinefunction(handler):

        @wraps(handler)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            execution = find_execution()
            if execution is None or execution.ended:
                check_is_guarded(handler)
            return await handler(*args, **kwargs)

        guarded.__signature__ = signature_of(handler)  # type: ignore[attr-defined]
        return guarded
    if inspect.isroutine(handler):

        @wraps(handler)
        def guarded_sync(*args: Any, **kwargs: Any) -> Any:
            check_is_guarded(handler)
            return handler(*args, **kwargs)

        guarded_sync.__signature__ = signature_of(handler)  # type: ignore[attr-defined]
        return guarded_sync
    return handler


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
