"""Responses to valid and invalid requests conform to the OpenAPI document.

Schemathesis makes the requests. No response may be a 500, have a status, a content type or a shape
that the document does not name.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.failures import FailureGroup

from onceward_services.app import create_app
from onceward_services.settings import load_settings

from .conftest import SECRET
from .test_isolation import NAMED, Person

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# Valid and invalid requests per operation.
EXAMPLES = 8


class Server:
    """The app in its own event loop, with some resources."""

    def __init__(self, database: Path) -> None:
        self.app = create_app(
            load_settings(
                database_url=f"sqlite:///{database}",
                jwt_secret=SECRET,
                field_changes_wait_seconds=1,
            )
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.ids: dict[str, str] = {}
        self._run(self._open())

    async def _open(self) -> None:
        onceward = self.app.state.onceward
        await onceward.open()
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://onceward")
        person = Person(self._client, "ada", "acme", onceward.store)
        self.signed_in = person.signed_in
        for path, named in NAMED.items():
            self.ids |= {
                f"{path} {name}": value for name, value in (await named.make(person)).items()
            }

    def close(self) -> None:
        self._run(self._client.aclose())
        self._run(self.app.state.onceward.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def send(self, case: Any) -> httpx.Response:
        """Send a generated request byte for byte."""
        made: Any = requests.Request(
            **case.as_transport_kwargs(base_url="http://onceward")
        ).prepare()
        body = made.body.encode() if isinstance(made.body, str) else made.body
        headers = [
            (name, value.encode("latin-1") if isinstance(value, str) else value)
            for name, value in made.headers.items()
        ]
        response: httpx.Response = self._run(
            self._client.request(made.method, made.url, headers=headers, content=body)
        )
        return response

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=30)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path / "services.db")
    yield running
    running.close()


def documented(app: Any) -> Any:
    """Return the document without its response for all other errors: it would name every status."""
    document = app.openapi()
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("default", None)
    return schemathesis.openapi.from_dict(document)


def faults_of(operation: Any, server: Server) -> list[str]:
    """Test an operation and return the errors in its responses."""
    faults: dict[str, str] = {}
    known = {
        name.partition(" ")[2]: value
        for name, value in server.ids.items()
        if operation.path.startswith(name.partition(" ")[0])
    }

    def tried(case: Any, data: st.DataObject) -> None:
        # Otherwise hardly any request would reach the handler.
        for name, value in known.items():
            if data.draw(st.integers(0, 3)):
                case.path_parameters[name] = value
        if data.draw(st.integers(0, 5)):
            case.headers.update(server.signed_in)
        if "Idempotency-Key" in case.headers and data.draw(st.integers(0, 3)):
            case.headers["Idempotency-Key"] = str(uuid4())
        if "If-Match" in case.headers and data.draw(st.booleans()):
            case.headers["If-Match"] = '"1"'
        response = server.send(case)
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            summary = f"{operation.label}: status {response.status_code}"
            for fault in group.exceptions:
                # Keep the first request of each fault.
                faults.setdefault(f"{summary}: {' '.join(str(fault).split())}", str(response.url))

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        quietly = settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        cases = operation.as_strategy(generation_mode=mode)
        with suppress(Unsatisfiable):  # an operation without input has no invalid input
            seed(20)(quietly(given(cases, st.data())(tried)))()
    return [f"{fault}\n  {url}" for fault, url in faults.items()]


def test_every_response_is_in_the_openapi_document(server: Server) -> None:
    schema = documented(server.app)
    tried = 0
    faults: list[str] = []
    for result in schema.get_all_operations():
        operation = result.ok()
        faults += faults_of(operation, server)
        tried += 1
    assert tried >= 40
    assert not faults, "\n".join(faults)
