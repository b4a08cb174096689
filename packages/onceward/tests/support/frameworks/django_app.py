"""The test app in Django. Run as a module with the arguments URL and PORT."""

import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

URL = sys.argv[1]


def _database() -> dict[str, Any]:
    if URL.startswith("sqlite"):
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": URL.removeprefix("sqlite:///"),
            "OPTIONS": {"timeout": 30, "init_command": "PRAGMA journal_mode=WAL"},
        }
    parts = urlsplit(URL)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": parts.username,
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname,
        "PORT": parts.port,
    }


settings.configure(
    DEBUG=False,
    SECRET_KEY="for tests",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    USE_TZ=True,
    DATABASES={"default": _database()},
    MIDDLEWARE=["onceward.django.OncewardMiddleware"],
    ONCEWARD={"TENANTS": "onceward.SINGLE_TENANT"},
)

import django  # noqa: E402

django.setup()

from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import connection  # noqa: E402
from django.http import HttpRequest, HttpResponse, JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

from onceward import Policy, ServiceError  # noqa: E402
from onceward.server.django_views import execution, guard  # noqa: E402
from packages.onceward.tests.support.frameworks.words import CREATE, LIMIT  # noqa: E402


@guard("orders.create", policy=Policy().replace(max_body_bytes=LIMIT))
def orders(request: HttpRequest) -> HttpResponse:
    if request.method == "GET":
        return _count()
    option = request.headers.get("x-do", "")
    item = json.loads(request.body)["item"]
    if option == "sign-in":
        return HttpResponse(status=302, headers={"location": "/login"})
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders (item) VALUES (%s)", [item])
        cursor.execute("SELECT count(*) FROM orders")
        n = cursor.fetchone()[0]
    if option == "raise":
        raise RuntimeError("as asked")
    if option == "refuse":
        raise ServiceError(422, "order.refused", "as asked")
    if option == "fail":
        return JsonResponse({"oops": True}, status=500)
    if option == "see-other":
        return HttpResponse(status=303, headers={"location": "/orders/a"})
    if option == "slow":
        time.sleep(0.4)
    if option == "enqueue":
        execution().enqueue("order.made", {"item": item}, resource_id=item)
    headers = {"location": f"/orders/{item}"}
    return JsonResponse({"item": item, "n": n}, status=201, headers=headers)


@guard("orders.number", policy=Policy(ordering="strict"))
def numbered(request: HttpRequest) -> HttpResponse:
    item = json.loads(request.body)["item"]
    if request.headers.get("x-do") == "slow":
        time.sleep(0.2)
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders (item) VALUES (%s)", [item])
    return JsonResponse({"item": item}, status=201)


def _count() -> HttpResponse:
    found = {}
    with connection.cursor() as cursor:
        for name, table in (
            ("orders", "orders"),
            ("records", "onceward_idempotency_records"),
            ("jobs", "onceward_jobs"),
        ):
            cursor.execute(f"SELECT count(*) FROM {table}")
            found[name] = cursor.fetchone()[0]
    return JsonResponse(found)


urlpatterns = [path("orders", orders), path("numbered", numbered)]

if __name__ == "__main__":
    with connection.cursor() as cursor:
        cursor.execute(CREATE)
    connection.close()
    make_server(
        "127.0.0.1", int(sys.argv[2]), get_wsgi_application(), threaded=True
    ).serve_forever()
