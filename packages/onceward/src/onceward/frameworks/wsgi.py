"""WSGI middleware for any WSGI app, by method and path. Nothing is sent before the commit.

::

    onceward = Onceward("sqlite:///shop.db", identify=…)
    onceward.guard_path("POST", "/orders")
    guard = WsgiGuard(app, onceward)     # serve this one

The caller is identified from the request's head. Flask and Django have their own integrations,
which decide after the app's sign-in: ``onceward.flask`` and ``onceward.django``.
"""

import io
from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from typing import Any

from onceward.app import Onceward
from onceward.batch.options import BatchOptions
from onceward.core.idempotency_record import Response
from onceward.frameworks.sync_bridge import (
    Bridge,
    Environ,
    StartResponse,
    SyncBatch,
    SyncExecution,
    WsgiApp,
    batch_options,
    collect,
    head_of,
    path_of,
    read_body,
)
from onceward.frameworks.views import no_caller
from onceward.guard.route_table import SAFE_METHODS

__all__ = ["WsgiGuard"]


class WsgiGuard:
    """Guards the operations of a WSGI app that were named with ``onceward.guard_path``."""

    def __init__(
        self, app: WsgiApp, onceward: Onceward, *, batch: str | BatchOptions | None = None
    ) -> None:
        """Wrap an app. The store is opened at the first guarded request of each process.

        ``batch`` is the path of an endpoint that takes many guarded requests in one, or its
        options. Each request of a batch has its own transaction.
        Raises ``ConfigurationError`` if the Onceward has neither ``identify`` nor ``tenants``.
        """
        if not onceward.runtime.callers.has_identify:
            raise no_caller(
                "WsgiGuard(app, onceward) guards an app",
                "Onceward(…, identify=…) with a function of the request's head that returns "
                "Principal(tenant=…, actor=…)",
                "Onceward(…, tenants=SINGLE_TENANT)",
            )
        # The object that was given.
        self.onceward = onceward
        self._app = app
        self._bridge = bridge = Bridge(onceward)
        options = batch_options(batch)
        self._batch = (
            None if options is None else SyncBatch(bridge, options, identify=bridge.identify)
        )

    @property
    def execution(self) -> SyncExecution:
        """The guarded request being served: caller, ids, ``enqueue``."""
        return self._bridge.execution

    @property
    def transaction(self) -> Any:
        """The transaction the guarded handler must write in. It commits with the response."""
        return self.execution.transaction

    def close(self) -> None:
        """Close the store. Call it when the process ends."""
        self._bridge.close()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one WSGI request."""
        batch, table = self._batch, self.onceward.runtime.routes.table()
        if batch is not None and batch.is_for(environ):
            return batch.serve_wsgi(environ, start_response, self, table.find)
        # Apps convert the method to upper case, and would run ``post`` as POST.
        method, path = environ["REQUEST_METHOD"].upper(), path_of(environ)
        match = None if method in SAFE_METHODS else table.find(method, path)
        if match is None:
            return self._app(environ, start_response)
        policy, prefix = match.policy, environ.get("SCRIPT_NAME", "")
        # Read after the sign-in, in this thread, and once more by the app.
        body = cache(lambda: read_body(environ, policy.max_body_bytes))
        return self._bridge.serve(
            head_of(environ, method, path),
            match,
            body,
            lambda: (self._handle(environ, body(), policy.max_response_bytes), None),
            added_headers=() if batch is None else (batch.options.header(prefix),),
        ).send(start_response)

    def _handle(self, environ: Environ, body: bytes, max_bytes: int) -> Response:
        """Run the app with a body that was read."""
        environ = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        # A file that the server would send, e.g. by its path, could not be stored.
        environ.pop("wsgi.file_wrapper", None)
        response = collect(self._app, environ, max_bytes)
        # After its connection was lost it is an outage: apps hide the error.
        if response.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.execution.refuse_lost_connection()
        return response
