"""The console as an ASGI app: sign-in, sessions, navigation, pages and actions.

Closed by default: without a session there is the sign-in page and its style sheet, nothing else.
"""

import asyncio
import inspect
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from onceward_protocol.extras import needs_extra

with needs_extra("", "onceward-operator"):
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Match as RouteMatch
    from starlette.routing import Route

from onceward.app import Onceward
from onceward.errors import NotAuthenticatedError, StoreUnavailableError
from onceward.stores.parts import LIBRARY_PARTS
from onceward_operator.console.access import Access, Operator, Role
from onceward_operator.console.live import LiveUpdates, View
from onceward_operator.console.page import (
    ConsoleError,
    Downloaded,
    NotShownError,
    Page,
    PageRequest,
    Redirected,
    Shown,
)
from onceward_operator.console.rendering import render
from onceward_operator.console.sessions import CONSOLE, Session, Sessions
from onceward_protocol.ids import new_request_id

__all__ = ["ConsoleApp"]

_COOKIE: Final = "onceward_console"
# A stream ends after this time, and the session is checked again.
_STREAM_SECONDS: Final = 60.0
_MAX_FORM_BYTES: Final = 64 * 1024
# Of the sign-in, which anybody may send: a token.
_MAX_SIGN_IN_BYTES: Final = 32 * 1024
_FORM_SECONDS: Final = 10.0
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_STATIC: Final = {
    "console.css": "text/css",
    "console.js": "text/javascript",
    "htmx-2.0.11.min.js": "text/javascript",
    "htmx-sse-2.2.4.min.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_SAME_SITE: Final = frozenset({"same-origin", "none"})

_log = logging.getLogger("onceward_operator.console")


class ConsoleApp:
    """Serves the pages below the path at which it is mounted."""

    def __init__(
        self,
        onceward: Onceward[Any],
        *,
        access: Access,
        pages: Sequence[Page],
        title: str,
        idle_seconds: float,
        max_seconds: float,
    ) -> None:
        self._onceward = onceward
        self._store = onceward.store
        # Its pages show all that the library has.
        self._store.schema.want(CONSOLE, *LIBRARY_PARTS)
        self._clock = onceward.clock
        self._access = access
        self._title = title
        self._sessions = Sessions(
            self._store, self._clock, idle_seconds=idle_seconds, max_seconds=max_seconds
        )
        self._live = LiveUpdates(self._store, self._render_view)
        # Replaced by the token of the session in what is rendered for several sessions.
        self._any_form_token = secrets.token_urlsafe()
        self._pages = [(_route(page), page) for page in pages]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._respond(request)
        except ClientDisconnect:
            return
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:  # noqa: C901, PLR0911 - one branch per kind of request
        path = _path_below(request)
        if request.method not in {"GET", "HEAD", "POST"}:
            return self._error(request, None, 405, "the console has pages and forms only")
        if path.startswith("static/") and request.method != "POST":
            return _static(path.removeprefix("static/"))
        if request.method == "POST" and not _is_same_origin(request):
            return self._error(request, None, 403, "this form was sent by a page of another site")
        if request.method != "POST" and request.scope["path"] == _root(request) != "":
            return self._redirect(request, "")  # the cookie is for the paths below
        session: Session | None = None
        try:
            await self._onceward.runtime.ready()
            self._onceward.runtime.request_log.start()  # mounted after the store was opened
            if path == "sign-in":
                return await self._sign_in(request)
            session = await self._session_of(request)
            if session is None:
                return self._to_sign_in(request, path)
            if path == "events" and request.method == "GET":
                return self._events(request, session)
            if path == "sign-out" and request.method == "POST":
                return await self._sign_out(request, session)
            return await self._serve(request, session, path)
        except ConsoleError as error:
            return self._error(request, session, error.status, str(error))
        except Exception as error:  # noqa: BLE001 - no page of a framework, no traceback
            if not isinstance(error, StoreUnavailableError):
                _log.exception("the console cannot show %s", path)
                return self._error(request, None, 500, "This is a defect; the log has the cause.")
            _log.warning("the console cannot reach the database: %s", error)
            return self._error(
                request,
                None,
                503,
                "The database does not respond. This page is loaded again every few seconds.",
                reload=True,
            )

    # -- sign-in ---------------------------------------------------------------------------------

    async def _sign_in(self, request: Request) -> Response:
        target = _safe_target(request.query_params.get("to", ""))
        if request.method != "POST":
            return self._page(request, None, "sign_in.html", {"error": None, "to": target})
        form = await _form_of(request, _MAX_SIGN_IN_BYTES)
        target = _safe_target(form.get("to", ""))
        error = "This token may not open the console: it needs the role viewer, operator or admin"
        operator = None
        try:
            operator = await self._access.sign_in(form.get("token", "").strip())
        except NotAuthenticatedError as refused:
            error = f"This token is not valid: {refused}"
        if operator is None or (not operator.sees_all and not operator.tenants):
            _log.warning("sign-in to the console refused: %s", error)
            values = {"error": error, "to": target}
            return self._page(request, None, "sign_in.html", values, status=403)
        before = _cookie_of(request)
        if before is not None:
            await self._sessions.end(before)
        session = await self._sessions.begin(operator)
        _log.info(
            "signed in to the console", extra={"actor": operator.subject, "role": operator.role}
        )
        response = self._redirect(request, target)
        self._set_cookie(request, response, session.secret or "")
        return response

    async def _sign_out(self, request: Request, session: Session) -> Response:
        self._check_form(session, await _form_of(request))
        secret = _cookie_of(request)
        if secret is not None:
            await self._sessions.end(secret)
        response = self._redirect(request, "sign-in")
        self._set_cookie(request, response, "", max_age=0)
        return response

    async def _session_of(self, request: Request) -> Session | None:
        secret = _cookie_of(request)
        return None if secret is None else await self._sessions.find(secret)

    def _to_sign_in(self, request: Request, path: str) -> Response:
        if _is_part(request):  # load the whole page
            return Response(status_code=401, headers={"hx-refresh": "true"})
        if request.method == "POST":
            return self._redirect(request, "sign-in")
        query = f"?{request.url.query}" if request.url.query else ""
        return self._redirect(request, f"sign-in?to={quote(path + query, safe='')}")

    def _set_cookie(
        self, request: Request, response: Response, secret: str, max_age: int | None = None
    ) -> None:
        response.set_cookie(
            _COOKIE,
            secret,
            max_age=max_age,
            path=f"{_root(request)}/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def _events(self, request: Request, session: Session) -> Response:
        """Return a stream that ends before the session may have ended: the browser reconnects."""
        self._live.check()
        address = urlsplit(request.query_params.get("page", ""))
        path, query = address.path, _shown_query(dict(parse_qsl(address.query)))
        page, parts = self._find("GET", path)
        self._asked(session.operator, page, parts, query)  # raises if it may not be seen
        if not page.live:
            raise NotShownError("this page is not live")
        until = asyncio.get_running_loop().time() + _STREAM_SECONDS
        ends_at = session.operator.expires_at
        if ends_at is not None:
            left = (ends_at - self._clock.now()).total_seconds()
            until = min(until, asyncio.get_running_loop().time() + left)
        view = _view(_root(request), path, query, session.operator)
        return StreamingResponse(
            self._live.stream(view, until=until),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def _render_view(self, view: View) -> str:
        """Render what a live page loads again, the same for all who may see it: ``Page.live``."""
        operator = Operator(
            subject="", role=view.role, tenants=view.tenants, sees_payloads=view.sees_payloads
        )
        page, parts = self._find("GET", view.path)
        asked = self._asked(operator, page, parts, dict(view.query))
        shown = await page.handler(asked)
        if not isinstance(shown, Shown):
            raise NotShownError("this page is not live")
        values = _values(page, asked, shown) | {
            "root": view.root,
            "path": view.path,
            "operator": operator,
            "form_token": self._any_form_token,
            "is_part": True,
        }
        return self._html(shown.template, values, package=page.templates)

    # -- pages -----------------------------------------------------------------------------------

    async def _serve(self, request: Request, session: Session, path: str) -> Response:
        page, parts = self._find(request.method, path)
        query = _shown_query(request.query_params)
        asked = self._asked(session.operator, page, parts, query)
        if page.method == "POST":
            form = await _form_of(request)
            self._check_form(session, form)
            _check_texts(*form.values())
            asked = replace(asked, form=form)
        elif page.live and _is_part(request):
            html = self._live.rendered(_view(_root(request), path, query, session.operator))
            if html is not None:
                return HTMLResponse(html.replace(self._any_form_token, session.form_token))
        found = await page.handler(asked)
        if isinstance(found, Redirected):
            notice = {} if found.notice is None else {"notice": found.notice}
            separator = "&" if "?" in found.path else "?"
            suffix = f"{separator}{urlencode(notice)}" if notice else ""
            return self._redirect(request, found.path + suffix)
        if isinstance(found, Downloaded):
            headers = {"content-disposition": f'attachment; filename="{found.name}"'}
            return StreamingResponse(found.content, media_type=found.media_type, headers=headers)
        values = _values(page, asked, found)
        return self._page(
            request, session, found.template, values, status=found.status, package=page.templates
        )

    def _asked(
        self, operator: Operator, page: Page, parts: Mapping[str, str], query: Mapping[str, str]
    ) -> PageRequest:
        """Return the request of an operator. Raises ``ConsoleError`` if they may not make it."""
        if not operator.may(page.role) or (page.needs_all_tenants and not operator.sees_all):
            needed = f"the role {page.role.label}" if not operator.may(page.role) else "all tenants"
            raise _RefusedError(f"this needs {needed}")
        _check_texts(*query.values(), *parts.values())
        tenant = operator.choose(query.get("tenant"))
        if tenant is None:
            raise NotShownError("there is no such tenant, or you may not see it")
        return PageRequest(
            operator=operator,
            store=self._store,
            now=self._clock.now(),
            tenant=tenant,
            query=query,
            form={},
            path=parts,
            request_id=new_request_id(),
        )

    def _find(self, method: str, path: str) -> tuple[Page, dict[str, str]]:
        wanted = "GET" if method == "HEAD" else method
        for route, page in self._pages:
            if page.method != wanted:
                continue
            scope = {"type": "http", "method": method, "path": f"/{path}", "root_path": ""}
            match, found = route.matches(scope)
            if match is RouteMatch.FULL:
                return page, found["path_params"]
        raise NotShownError("there is no such page")

    def _page(
        self,
        request: Request,
        session: Session | None,
        template: str,
        values: dict[str, Any],
        *,
        status: int = 200,
        package: str = "onceward_operator.console",
    ) -> Response:
        operator = None if session is None else session.operator
        values = values | {
            "root": _root(request),
            "path": _path_below(request),
            "operator": operator,
            "form_token": "" if session is None else session.form_token,
            "navigation": [] if operator is None else self._navigation(session),
            "is_part": _is_part(request),
        }
        return HTMLResponse(self._html(template, values, package=package), status)

    def _html(self, template: str, values: dict[str, Any], *, package: str) -> str:
        shared = {
            "title": self._title,
            "now": self._clock.now(),
            "Role": Role,
            "page": None,
            "query": {},
            "notice": None,
            "reload": False,
        }
        return render(template, shared | values, package=package)

    def _navigation(self, session: Session | None) -> list[tuple[str, list[Page]]]:
        """Return the pages that an operator may open, by group."""
        assert session is not None  # noqa: S101 - the caller has checked
        operator, groups = session.operator, dict[str, list[Page]]()
        for _, page in self._pages:
            if page.title is not None and operator.may(page.role):
                if page.needs_all_tenants and not operator.sees_all:
                    continue
                groups.setdefault(page.group, []).append(page)
        return list(groups.items())

    def _error(
        self,
        request: Request,
        session: Session | None,
        status: int,
        message: str,
        *,
        reload: bool = False,
    ) -> Response:
        values = {"message": message, "status": status, "reload": reload}
        response = self._page(request, session, "error.html", values, status=status)
        if reload:
            response.headers["retry-after"] = "3"
        return response

    def _check_form(self, session: Session, form: dict[str, str]) -> None:
        if not session.accepts(form.get("form_token", "")):
            raise _RefusedError("this form is from an ended session: load the page again")

    @staticmethod
    def _redirect(request: Request, path: str) -> Response:
        return RedirectResponse(f"{_root(request)}/{path}", status_code=303)


class _RefusedError(ConsoleError):
    """The operator may not do this."""

    status = 403


def _route(page: Page) -> Route:
    async def never(_request: Request) -> Response:  # only its pattern is used
        raise NotImplementedError

    if inspect.iscoroutinefunction(page.handler) is False:
        raise TypeError(f"the handler of the page {page.path!r} must be an async function")
    return Route(f"/{page.path}", never, methods=[page.method])


def _root(request: Request) -> str:
    """Return the path of the console, for links."""
    root: str = request.scope.get("root_path", "")
    return root.rstrip("/")


def _path_below(request: Request) -> str:
    path: str = request.scope["path"]
    root = _root(request)
    return (path.removeprefix(root) if path.startswith(root) else path).strip("/")


def _safe_target(path: str) -> str:
    """Return where to go after the sign-in: a path below the console, never another host."""
    parts = urlsplit(path)
    is_below = not parts.scheme and not parts.netloc and not path.startswith(("/", "\\"))
    is_plain = path.isprintable() and "\\" not in path and ".." not in path
    return path if is_below and is_plain else ""


def _is_same_origin(request: Request) -> bool:
    """Return whether a form was sent by a page of the console, as far as the browser says."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in _SAME_SITE
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def _cookie_of(request: Request) -> str | None:
    found = []
    for header in request.headers.getlist("cookie"):
        try:
            cookies = SimpleCookie(header)
        except CookieError:
            continue
        if _COOKIE in cookies and cookies[_COOKIE].value:
            found.append(cookies[_COOKIE].value)
    return found[0] if len(found) == 1 else None


def _is_part(request: Request) -> bool:
    """Return whether a live page asks for its content, to put it in place of the old one."""
    return request.headers.get("hx-request") == "true"


def _shown_query(query: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in query.items() if value}


def _view(root: str, path: str, query: Mapping[str, str], operator: Operator) -> View:
    return View(
        root,
        path,
        tuple(sorted(query.items())),
        operator.role,
        operator.tenants,
        operator.sees_payloads,
    )


def _values(page: Page, asked: PageRequest, shown: Shown) -> dict[str, Any]:
    """Return the values of a request for templates, besides what the layout needs."""
    return {
        **shown.values,
        "notice": asked.query.get("notice"),
        "tenant": None if asked.is_of_all_tenants else asked.tenant,
        "query": asked.query,
        "page": page,
    }


def _check_texts(*texts: str) -> None:
    """Raise for what no column can contain."""
    if any("\x00" in text for text in texts):
        raise ConsoleError("the address or the form contains a NUL character")


async def _form_of(request: Request, limit: int = _MAX_FORM_BYTES) -> dict[str, str]:
    """Read the fields of a form, up to a limit of bytes and time."""
    if int(request.headers.get("content-length", 0)) > limit:
        raise ConsoleError(f"a form may have at most {limit} bytes here")
    body = b""
    try:
        async with asyncio.timeout(_FORM_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise ConsoleError(f"a form may have at most {limit} bytes here")
    except TimeoutError:
        raise ConsoleError("the form did not arrive in time") from None
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body)))
    except (UnicodeDecodeError, ValueError):
        raise ConsoleError("the form cannot be read") from None


def _static(name: str) -> Response:
    media_type = _STATIC.get(name)
    if media_type is None:
        return Response("not found", 404, media_type="text/plain")
    content = files("onceward_operator.console").joinpath("static", name).read_bytes()
    headers = {"cache-control": "public, max-age=3600"}
    return Response(content, headers=headers, media_type=media_type)
