"""``guard`` of Django: the decision is taken around the view, after sign-in and permissions."""

import asyncio
import io
import itertools
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.onceward.tests.support import django_project  # first: it configures Django

assert django_project

from django.contrib.auth.decorators import login_required  # noqa: E402
from django.contrib.auth.middleware import AuthenticationMiddleware  # noqa: E402
from django.contrib.auth.models import Group, Permission, User  # noqa: E402
from django.contrib.contenttypes.models import ContentType  # noqa: E402
from django.core.cache import cache  # noqa: E402
from django.db import IntegrityError, connections  # noqa: E402
from django.http import FileResponse, HttpRequest, HttpResponse  # noqa: E402
from django.shortcuts import redirect  # noqa: E402
from django.test import AsyncClient, Client, TestCase, override_settings  # noqa: E402
from django.test.client import MULTIPART_CONTENT  # noqa: E402
from django.urls import include, path  # noqa: E402
from django.utils.decorators import method_decorator  # noqa: E402
from django.views import View  # noqa: E402
from django.views.decorators.csrf import csrf_exempt  # noqa: E402
from rest_framework import viewsets  # noqa: E402
from rest_framework.decorators import action, api_view  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.routers import DefaultRouter  # noqa: E402

from onceward import SINGLE_TENANT, Policy  # noqa: E402
from onceward.django import guard, user_principal  # noqa: E402
from onceward.errors import (  # noqa: E402
    ConfigurationError,
    ResponseTooLargeError,
    StreamingResponseError,
    UsageError,
)
from onceward.frameworks.django import django_onceward, django_response  # noqa: E402
from onceward.frameworks.wsgi import Served  # noqa: E402
from packages.onceward.tests.support.django_project import urls as views  # noqa: E402

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def empty_tables() -> None:
    Group.objects.all().delete()
    User.objects.all().delete()
    cache.clear()


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    django_onceward().bridge.close()
    connections.close_all()


def key() -> dict[str, str]:
    return {"Idempotency-Key": f"key-{next(_numbers)}"}


def signed_in(name: str = "ann", *, permitted: bool = True) -> Client:
    user, _ = User.objects.get_or_create(username=name)
    if permitted:
        user.user_permissions.add(_permission())
    client = Client()
    client.force_login(user)
    return client


def _permission() -> Permission:
    kind = ContentType.objects.get_for_model(Group)
    found, _ = Permission.objects.get_or_create(
        codename="add_group", content_type=kind, defaults={"name": "Can add group"}
    )
    return found


def post(client: Client, url: str, headers: dict[str, str], body: Any = None) -> Any:
    return client.post(url, body or {}, content_type="application/json", headers=headers)


def is_replay(response: Any) -> bool:
    return bool(response.headers.get("Idempotency-Replayed") == "true")


# -- the app's own sign-in ---------------------------------------------------------------------


def test_replay_needs_the_sign_in_of_django() -> None:
    ann, again = signed_in("ann"), key()
    first = post(ann, "/function", again)
    assert (first.status_code, first.json()) == (201, {"n": 1})
    replay = post(ann, "/function", again)
    assert (replay.content, is_replay(replay)) == (first.content, True)
    assert ann.get("/function").json() == {"orders": 1}
    ann.logout()
    refused = post(ann, "/function", again)  # the app's own response
    assert (refused.status_code, refused.url) == (302, "/login?next=/function")
    assert post(signed_in("bob"), "/function", again).json() == {"n": 2}


def test_principal_is_the_user_unless_a_function_or_setting_says_otherwise() -> None:
    ann = signed_in()
    pk = str(User.objects.get().pk)
    assert post(ann, "/function/who", key()).json() == {"tenant": pk, "actor": pk}
    again = key()
    assert post(Client(), "/company", again | {"X-Company": "acme"}).json() == {"n": 2}
    assert is_replay(post(Client(), "/company", again | {"X-Company": "acme"}))
    assert post(Client(), "/company", again | {"X-Company": "other"}).json() == {"n": 3}
    with override_settings(ONCEWARD={"PRINCIPAL": f"{views.__name__}.company"}):
        found = post(ann, "/function/who", key() | {"X-Company": "acme"})
        assert found.json() == {"tenant": "acme", "actor": "somebody"}
    with override_settings(ONCEWARD={"TENANTS": "onceward.SINGLE_TENANT"}):
        assert post(ann, "/function/who", key()).json()["tenant"] == "everyone"


def test_anonymous_caller_of_a_guarded_view_without_login_required_gets_401() -> None:
    refused = post(Client(), "/public", key())
    assert (refused.status_code, refused.json()["code"]) == (401, "auth.required")
    assert Group.objects.count() == 0


@pytest.mark.parametrize(
    "url",
    [
        "/by-method",
        "/whole-class",
        "/on-dispatch",
        "/decorated-method",
        "/rest/view",
        "/rest/function",
        "/rest/orders/",
        "/rest/whole/",
    ],
)
def test_replay_needs_the_permission_that_the_view_checks(url: str) -> None:
    client, again = signed_in(), key()
    body = {"name": "boots", "item": "boots"}
    first = post(client, url, again, body)
    assert first.status_code == 201, first.content
    replay = post(client, url, again, body)
    assert (replay.content, is_replay(replay)) == (first.content, True)
    assert replay["Content-Type"] == first["Content-Type"]
    assert post(client, url, again, body | {"name": "shoes"}).status_code == 409
    assert post(client, url, {}, body).json()["code"] == "idempotency.key_required"
    User.objects.get().user_permissions.clear()
    refused = post(client, url, again, body)
    assert (refused.status_code, is_replay(refused)) == (403, False)
    assert Group.objects.count() == 1


def test_mixin_that_redirects_decides_before_the_guard() -> None:
    client, again = signed_in(permitted=False), key()
    assert post(client, "/with-login", again).status_code == 201
    client.logout()
    assert post(client, "/with-login", again).status_code == 302


# -- class-based views and REST framework ------------------------------------------------------


def test_handlers_without_a_guard_and_safe_methods_are_not_guarded() -> None:
    client = signed_in()
    assert client.put("/by-method").json() == {"put": True}
    assert client.get("/whole-class").json() == {"got": True}
    assert client.delete("/whole-class").status_code == 405
    # One guard for the class: POST and PUT share a name, but not a response.
    again = key()
    assert post(client, "/whole-class", again).status_code == 201
    assert client.put("/whole-class", headers=again).status_code == 409


def test_actions_of_a_viewset_are_guarded() -> None:
    client, again = signed_in(), key()
    group = Group.objects.create(name="paid")
    first = post(client, f"/rest/orders/{group.pk}/pay/", again)
    assert (first.status_code, first.json()) == (200, {"paid": "paid", "n": 2})
    assert is_replay(post(client, f"/rest/orders/{group.pk}/pay/", again))
    assert post(client, "/rest/orders/999/pay/", again).status_code == 409


def test_all_writing_actions_of_a_guarded_viewset_are_guarded() -> None:
    client = signed_in()
    group = Group.objects.create(name="old")
    for method, status in (("put", 200), ("patch", 200), ("delete", 204)):
        again = key()
        send = getattr(client, method)
        options: Any = {"content_type": "application/json", "headers": again}
        first = send(f"/rest/whole/{group.pk}/", {"name": method}, **options)
        assert (first.status_code, is_replay(first)) == (status, False), first.content
        replay = send(f"/rest/whole/{group.pk}/", {"name": method}, **options)
        assert (replay.status_code, replay.content, is_replay(replay)) == (
            status,
            first.content,
            True,
        )


@guard("vs", principal=views.company)
class ShipViewSet(viewsets.ViewSet):
    authentication_classes = ()
    permission_classes = ()

    def create(self, request: Any) -> Any:
        return Response("create ran")

    @action(detail=False, methods=["post"])
    def load(self, request: Any) -> Any:
        return Response("load ran")

    @action(detail=True, methods=["post"])
    def ship(self, request: Any, pk: str) -> Any:
        return Response("ship ran")

    @action(detail=True, methods=["post"])
    def refund(self, request: Any, pk: str) -> Any:
        return Response("refund ran")


@method_decorator(guard("dispatch_vs", principal=views.company), name="dispatch")
class DispatchViewSet(viewsets.ViewSet):
    authentication_classes = ()
    permission_classes = ()

    def create(self, request: Any) -> Any:
        return Response("create ran")

    @action(detail=False, methods=["post"])
    def load(self, request: Any) -> Any:
        return Response("load ran")

    @action(detail=True, methods=["post"])
    def ship(self, request: Any, pk: str) -> Any:
        return Response("ship ran")

    @action(detail=True, methods=["post"])
    def refund(self, request: Any, pk: str) -> Any:
        return Response("refund ran")


@guard("two", principal=views.company)
def two(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.path)


@guard("two.class", principal=views.company)
class Two(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(request.path)


class TwoRoutes:
    """Two URLconfs: as it was, and with a second path for each view."""

    router = DefaultRouter()  # has a second path for each action, with a format
    router.register("vs", ShipViewSet, basename="vs")
    router.register("dispatch", DispatchViewSet, basename="dispatch")
    more = DefaultRouter()
    more.register("again", ShipViewSet, basename="again")
    one = (path("two/a", two), path("class/a", Two.as_view()), path("", include(router.urls)))
    urlpatterns = (
        *one,
        path("two/b", csrf_exempt(two)),
        path("anyone", guard("anyone")(lambda _: HttpResponse(b"made"))),
        path("class/", include([path("b", Two.as_view())])),
        path("", include(more.urls)),
    )


@override_settings(ROOT_URLCONF=TwoRoutes)
@pytest.mark.parametrize("name", ["vs", "dispatch"])
def test_actions_of_a_named_viewset_do_not_replay_each_other(name: str) -> None:
    client, again = Client(), key() | {"X-Company": "acme"}
    for url in ("load/", "1/ship/", "1/refund/", ""):
        first = post(client, f"/{name}/{url}", again)
        expected = f"{url.rstrip('/').rpartition('/')[2] or 'create'} ran"
        assert (first.json(), is_replay(first)) == (expected, False)
        assert is_replay(post(client, f"/{name}/{url}", again))


@override_settings(ROOT_URLCONF=TwoRoutes)
@pytest.mark.parametrize(
    ("one", "other"),
    [("/two/a", "/two/b"), ("/class/b", "/class/a"), ("/vs/1/ship/", "/again/1/ship/")],
)
def test_named_view_does_not_replay_across_its_routes(one: str, other: str) -> None:
    client, again = Client(), key() | {"X-Company": "acme"}
    assert post(client, one, again).status_code == 200
    assert is_replay(post(client, one, again))
    refused = post(client, other, again)
    assert (refused.status_code, refused.json()["code"]) == (409, "idempotency.payload_mismatch")
    assert post(client, other, key() | {"X-Company": "acme"}).status_code == 200


def test_route_added_to_a_named_view_does_not_change_the_records_of_the_first() -> None:
    client, again = Client(), key() | {"X-Company": "acme"}
    with override_settings(ROOT_URLCONF=TwoRoutes.one):
        assert post(client, "/two/a", again).status_code == 200
    with override_settings(ROOT_URLCONF=TwoRoutes):
        assert is_replay(post(client, "/two/a", again))


@guard(principal=views.company)
class Parent(View):
    http_method_names = ("get", "post", "purge")

    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"read")

    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"parent")

    def purge(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"purged")


class Child(Parent):
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"child")


@guard(principal=views.company)
class ParentViewSet(viewsets.ViewSet):
    authentication_classes = ()
    permission_classes = ()

    def create(self, request: Any) -> Any:
        return Response("create")


class ChildViewSet(ParentViewSet):
    def create(self, request: Any) -> Any:
        return Response("create of the child")

    @action(detail=False, methods=["post"])
    def added(self, request: Any) -> Any:
        return Response("added by the child")


class AsyncOnDispatch(View):
    async def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


class Subclasses:
    router = DefaultRouter()
    router.register("set", ChildViewSet, basename="set")
    urlpatterns = (
        path("parent", Parent.as_view()),
        path("child", Child.as_view()),
        path(
            "async",
            method_decorator(guard("async"), name="dispatch")(AsyncOnDispatch).as_view(),
        ),
        path("", include(router.urls)),
    )


@override_settings(ROOT_URLCONF=Subclasses)
@pytest.mark.parametrize(
    ("method", "url", "content"),
    [
        ("POST", "/child", b"child"),
        ("PURGE", "/child", b"purged"),
        ("PURGE", "/parent", b"purged"),
        ("POST", "/set/", b'"create of the child"'),
        ("POST", "/set/added/", b'"added by the child"'),
    ],
)
def test_all_methods_of_a_guarded_class_and_its_subclasses_are_guarded(
    method: str, url: str, content: bytes
) -> None:
    client, again = Client(), key() | {"X-Company": "acme"}
    first = client.generic(method, url, headers=again)
    assert (first.status_code, first.content, is_replay(first)) == (200, content, False)
    replay = client.generic(method, url, headers=again)
    assert (replay.content, is_replay(replay)) == (content, True)
    assert client.get("/child").content == b"read"


@override_settings(ROOT_URLCONF=Subclasses)
def test_async_handler_below_a_guarded_dispatch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"AsyncOnDispatch\.post is async.*a plain def"):
        post(Client(), "/async", key())


def test_body_that_a_permission_has_parsed_is_compared() -> None:
    client, again = signed_in(), key()
    url = f"/rest/whole/{Group.objects.create(name='x').pk}/pay/"
    first = post(client, url, again, {"name": "a", "more": [1, None]})
    assert first.json()["paid"] == "a"
    assert is_replay(post(client, url, again, {"more": [1, None], "name": "a"}))
    assert post(client, url, again, {"name": "b"}).status_code == 409


def test_validation_error_of_rest_framework_is_stored_and_rolls_back() -> None:
    client, again = signed_in(), key()
    first = post(client, "/rest/orders/", again, {"name": ""})
    assert (first.status_code, first.json()) == (400, {"name": ["This field may not be blank."]})
    replay = post(client, "/rest/orders/", again, {"name": ""})
    assert (replay.content, is_replay(replay)) == (first.content, True)


def test_throttle_of_rest_framework_counts_replays() -> None:
    client, again = signed_in(), key()
    statuses = [post(client, "/rest/throttled", again).status_code for _ in range(4)]
    assert statuses == [201, 201, 201, 429]


# -- responses and errors ----------------------------------------------------------------------


def test_response_that_was_not_made_by_the_view_keeps_all_its_cookies() -> None:
    cookies = ["a=1; Path=/", "a=2; Path=/shop", "b=x=y; Secure; HttpOnly; Partitioned"]
    headers = [(b"set-cookie", cookie.encode()) for cookie in cookies]
    response = django_response(Served(201, [*headers, (b"etag", b'"1"')], b"made"))
    assert [cookie.OutputString() for cookie in response.cookies.values()] == cookies
    assert (dict(response.items()), response.content) == ({"etag": '"1"'}, b"made")
    client = Client()
    client.cookies.update({morsel.key: morsel for morsel in response.cookies.values()})
    assert (client.cookies["a"].value, client.cookies["b"].value) == ("2", "x=y")


def returns_file(request: HttpRequest) -> FileResponse:
    file = io.BytesIO(Path(__file__).read_bytes())
    response = FileResponse(file, as_attachment=True, filename="receipt.txt")
    response.set_cookie("seen", "yes")
    return response


class Returned:
    urlpatterns = (
        path("file", guard("file", principal=views.company)(returns_file)),
        path(
            "large",
            guard("large", principal=views.company, policy=Policy(max_response_bytes=9))(
                returns_file
            ),
        ),
        path("nothing", guard("nothing", principal=views.company)(lambda _: None)),
        path("coroutine", guard("co", principal=views.company)(lambda _: asyncio.sleep(0))),
    )


@override_settings(ROOT_URLCONF=Returned)
def test_file_response_is_stored_and_replayed() -> None:
    client, again = Client(), key() | {"X-Company": "acme"}
    first = post(client, "/file", again)
    assert (first.status_code, first.content) == (200, Path(__file__).read_bytes())
    assert first["Content-Disposition"] == 'attachment; filename="receipt.txt"'
    assert first["Content-Type"].startswith("text/plain")
    assert first.cookies["seen"].value == "yes"
    replay = post(client, "/file", again)
    assert (replay.content, is_replay(replay)) == (first.content, True)
    with pytest.raises(ResponseTooLargeError, match="more than 9 bytes"):
        post(client, "/large", again)


@override_settings(ROOT_URLCONF=Returned)
@pytest.mark.parametrize(
    ("url", "line"),
    [("/nothing", "must return an HttpResponse, not None"), ("/coroutine", "make it a plain def")],
)
def test_view_that_returns_no_response_is_named(url: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        post(Client(), url, key() | {"X-Company": "acme"})


def test_template_response_is_rendered_and_replayed() -> None:
    client, again = signed_in(), key()
    with override_settings(
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}]
    ):
        assert post(client, "/function/template", again).content == b"<p>1</p>"
        assert post(client, "/function/template", again).content == b"<p>1</p>"


def test_errors_of_django_are_stored_and_a_stream_is_named() -> None:
    client, missing = signed_in(), key()
    assert post(client, "/function/missing", missing).status_code == 404
    assert is_replay(post(client, "/function/missing", missing))
    assert Group.objects.count() == 0
    with pytest.raises(StreamingResponseError, match="streams its response"):
        post(client, "/function/stream", key())


def test_onceward_errors_of_views_without_a_guard_have_the_format_of_the_app() -> None:
    client = signed_in()
    unknown = client.get("/open", headers={"X-Request-ID": "mine"})
    assert (unknown.status_code, unknown.json()["requestId"]) == (404, "mine")
    with override_settings(ONCEWARD={"ERROR_FORMAT": lambda error: {"fault": error.code}}):
        assert client.get("/open").json() == {"fault": "order.unknown"}


async def test_guard_works_below_the_asgi_handler_of_django() -> None:
    client, headers = AsyncClient(), {"X-Company": "acme"}
    refused = await client.post("/company", headers=headers | {"Idempotency-Key": ""})
    assert (refused.status_code, refused.json()["code"]) == (400, "idempotency.key_invalid")
    again = headers | key()
    first, replay = [await client.post("/company", headers=again) for _ in range(2)]
    assert (first.status_code, replay.content, is_replay(replay)) == (201, first.content, True)


def test_form_whose_csrf_token_was_checked_is_compared_by_its_fields_and_files() -> None:
    client = Client(enforce_csrf_checks=True)
    client.cookies["csrftoken"] = token = "a" * 32

    def send(again: dict[str, str], item: str, photo: str) -> Any:
        data = {"item": item, "photo": io.BytesIO(photo.encode()), "csrfmiddlewaretoken": token}
        headers = again | {"X-Company": "acme"}
        return client.post("/upload", data, content_type=MULTIPART_CONTENT, headers=headers)

    again = key()
    first = send(again, "boots", "red")
    assert first.json() == {"item": "boots", "photo": "red"}
    assert is_replay(send(again, "boots", "red"))
    assert send(again, "boots", "blue").status_code == 409
    assert send(again, "shoes", "red").status_code == 409


# -- transactions ------------------------------------------------------------------------------


class ByMethod(View):
    @guard("atomic.by_method", principal=views.company)
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"made")


@guard("atomic.whole", principal=views.company)
class Whole(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"made")


urlpatterns = [
    path(
        "function",
        guard("atomic.function", principal=views.company)(lambda _: HttpResponse(b"made")),
    ),
    path("whole", Whole.as_view()),
    path("by-method", ByMethod.as_view()),
]


@override_settings(ROOT_URLCONF=__name__)
def test_guarded_views_are_excluded_from_atomic_requests_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    client, again = Client(), key() | {"X-Company": "acme"}
    for url in ("/function", "/whole"):
        assert post(client, url, again).content == b"made"
        assert is_replay(post(client, url, again))
    with pytest.raises(ConfigurationError, match="ATOMIC_REQUESTS is on, guard the class"):
        post(client, "/by-method", again)


class InTestCase(TestCase):
    """Django wraps each of these in a transaction, which it rolls back."""

    def run_guarded_view(self) -> None:
        headers = {"Idempotency-Key": "the-same-in-both", "X-Company": "acme"}
        first = post(self.client, "/company", headers)
        assert (first.status_code, is_replay(first)) == (201, False), first.content
        assert is_replay(post(self.client, "/company", headers))
        assert post(self.client, "/company", headers | {"X-Company": "b"}).status_code == 201
        assert Group.objects.count() == 2

    def test_one(self) -> None:
        self.run_guarded_view()

    def test_two(self) -> None:
        self.run_guarded_view()

    def test_missing_tables_are_an_error(self) -> None:
        with (
            override_settings(ONCEWARD={"TABLE_PREFIX": "missing_"}),
            self.assertRaisesMessage(ConfigurationError, "INSTALLED_APPS"),
        ):
            post(self.client, "/company", key() | {"X-Company": "acme"})


# -- mistakes ----------------------------------------------------------------------------------


async def an_async_view(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


class NoView:
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


class NoHandlers(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (views.ByMethod.as_view(), "above as_view"),
        (api_view(["POST"])(views.public), "below @api_view"),
        (an_async_view, "make it a plain def"),
        (NoHandlers, "has no handler of POST"),
        (NoHandlers.get, "serves GET"),
        (NoView, "is no view"),
    ],
)
def test_views_that_cannot_be_guarded_are_refused(view: Any, line: str) -> None:
    with pytest.raises(ConfigurationError, match=line):
        guard()(view)


def test_guard_without_parentheses_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="with parentheses"):
        guard(views.public)  # type: ignore[arg-type]


def test_two_views_with_one_name_are_refused() -> None:
    client = signed_in()
    assert post(client, "/rest/function", key(), {"item": "a"}).status_code == 201
    with pytest.raises(ConfigurationError, match=r"same_name and .*rest_function are both"):
        post(client, "/rest/same-name", key())


def test_guard_must_be_innermost_on_dispatch() -> None:
    def plain(function: Any) -> Any:
        def wrapped(request: Any, *args: Any, **kwargs: Any) -> Any:
            return function(request, *args, **kwargs)

        wrapped.__name__ = function.__name__
        return wrapped

    view = method_decorator([guard("x"), plain], name="dispatch")(views.WithLogin)
    with pytest.raises(ConfigurationError, match="innermost"):
        view.as_view()(_request())


def _request() -> HttpRequest:
    request = HttpRequest()
    request.method = "POST"
    return request


def test_rate_limit_without_a_limiter_is_refused() -> None:
    with (
        override_settings(ONCEWARD={"POLICY": Policy(rate_limit="5/minute")}),
        pytest.raises(ConfigurationError, match="no limiter is configured"),
    ):
        post(signed_in(), "/function", key())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"PRINCIPLE": user_principal}, "principle"),
        ({"PRINCIPAL": "shop.missing.member"}, r'ONCEWARD\["PRINCIPAL"\].*shop'),
        ({"POLICY": {"key_required": False}}, r'ONCEWARD\["POLICY"\].*must be a Policy'),
        ({"PRINCIPAL": user_principal, "TENANTS": SINGLE_TENANT}, "give one of them"),
        ({"TENANTS": "onceward.ALL"}, r'ONCEWARD\["TENANTS"\]'),
        ({"USING": "other"}, r'ONCEWARD\["USING"\].*other.*default'),
    ],
)
def test_invalid_setting_is_refused(settings: dict[str, Any], line: str) -> None:
    with override_settings(ONCEWARD=settings), pytest.raises(ConfigurationError, match=line):
        django_onceward()


def test_policy_that_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be a Policy"):
        guard("x", policy={"key_required": False})  # type: ignore[arg-type]


def test_guard_on_perform_create_names_the_method_to_guard() -> None:
    class Orders(viewsets.ViewSet):
        @guard("x")
        def perform_create(self, serializer: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"guard create\(\), which calls it"):
        Orders().perform_create(object())


def swallows(request: HttpRequest) -> HttpResponse:
    Group.objects.create(name="one")
    with suppress(IntegrityError):
        Group.objects.create(name="one")
    return HttpResponse(b"made", status=201)


class Swallows:
    urlpatterns = (path("swallows", guard("swallows", principal=views.company)(swallows)),)


@override_settings(ROOT_URLCONF=Swallows)
def test_swallowed_database_error_is_a_500_that_says_what_to_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client(raise_request_exception=False)
    for _ in range(2):
        response = post(client, "/swallows", key() | {"X-Company": "acme"})
        assert (response.status_code, "Retry-After" in response) == (500, False)
    assert "transaction.atomic()" in caplog.text
    assert Group.objects.count() == 0


def test_users_without_a_primary_key_do_not_share_a_tenant() -> None:
    request = SimpleNamespace(user=SimpleNamespace(is_authenticated=True, pk=None))
    with pytest.raises(ConfigurationError, match="PRINCIPAL"):
        user_principal(request)


NO_CALLER = r'"PRINCIPAL".*AuthenticationMiddleware.*"onceward.SINGLE_TENANT"'


@override_settings(MIDDLEWARE=["django.middleware.csrf.CsrfViewMiddleware"])
def test_guard_of_a_project_that_does_not_say_who_calls_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard("x")  # views of REST framework have users
    monkeypatch.delitem(sys.modules, "rest_framework")
    guard("x", principal=user_principal)
    with pytest.raises(ConfigurationError, match=NO_CALLER):
        guard("x")
    for name in ("IDENTIFY", "PRINCIPAL", "TENANTS"):
        with override_settings(ONCEWARD={name: "not read yet"}):
            guard("x")
    for middleware in ("django.contrib.auth.middleware.AuthenticationMiddleware", OWN):
        with override_settings(MIDDLEWARE=[middleware]):
            guard("x")


class OwnAuthentication(AuthenticationMiddleware):
    """A middleware of the project."""


OWN = f"{__name__}.OwnAuthentication"


@override_settings(ROOT_URLCONF=TwoRoutes, MIDDLEWARE=[])
def test_request_without_a_user_is_refused_unless_all_callers_share_a_tenant() -> None:
    with pytest.raises(ConfigurationError, match=NO_CALLER):
        post(Client(), "/anyone", key())
    with override_settings(ONCEWARD={"TENANTS": SINGLE_TENANT}):
        assert post(Client(), "/anyone", key()).status_code == 200


@csrf_exempt
@guard("form", policy=Policy(redirects_stored={302}), principal=views.company)
@login_required  # below the guard: a common mistake
def form(request: HttpRequest) -> HttpResponse:
    views.write()
    response: HttpResponse = redirect("/done")
    return response


class Forms:
    urlpatterns = (path("form", form),)


@override_settings(ROOT_URLCONF=Forms)
def test_redirect_to_sign_in_frees_the_key_and_a_redirect_after_a_write_is_stored() -> None:
    again = key() | {"X-Company": "acme"}
    refused = post(Client(), "/form", again)
    assert (refused.status_code, refused.url) == (302, "/login?next=/form")
    ann = signed_in()
    first, replay = post(ann, "/form", again), post(ann, "/form", again)
    assert (first.status_code, first.url, is_replay(first)) == (302, "/done", False)
    assert (replay["Location"], is_replay(replay), Group.objects.count()) == ("/done", True, 1)
