"""The Django app under load: one view, bare or guarded; ``BENCH_APP=guarded`` guards it.

The project has the middleware of ``startproject``, and the view is what a Django user writes: parse
the body, one ORM insert. The bare one runs in the
transaction of ``ATOMIC_REQUESTS``, the guarded one in the guard's. Served by gunicorn with one
worker and 16 threads, each with a persistent connection.
"""

import json
import os
import uuid
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

GUARDED = os.environ.get("BENCH_APP") == "guarded"


def _database() -> dict[str, Any]:
    parts = urlsplit(os.environ["BENCH_DATABASE"])
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": parts.username,
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname,
        "PORT": parts.port,
        "CONN_MAX_AGE": None,
        "ATOMIC_REQUESTS": True,
    }


settings.configure(
    DEBUG=False,
    SECRET_KEY="bench",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    USE_TZ=True,
    DATABASES={"default": _database()},
    # As startproject makes them.
    INSTALLED_APPS=[
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.sessions",
        "django.contrib.messages",
    ],
    MIDDLEWARE=[
        "django.middleware.security.SecurityMiddleware",
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
        "django.middleware.clickjacking.XFrameOptionsMiddleware",
    ],
    ONCEWARD={"TENANTS": "onceward.SINGLE_TENANT"},
)

import django  # noqa: E402

django.setup()

from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import models  # noqa: E402
from django.http import HttpRequest, HttpResponse, JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402
from django.views.decorators.csrf import csrf_exempt  # noqa: E402

from onceward.django import guard  # noqa: E402


class Order(models.Model):  # noqa: DJ008
    id = models.TextField(primary_key=True)
    item = models.TextField()
    quantity = models.IntegerField()

    class Meta:
        app_label = "bench"
        db_table = "orders"


@csrf_exempt
def create(request: HttpRequest) -> HttpResponse:
    order = json.loads(request.body)
    new = str(uuid.uuid4())
    Order.objects.create(id=new, item=order["item"], quantity=order["quantity"])
    return JsonResponse({"id": new, "item": order["item"]}, status=201)


urlpatterns = [
    path("orders", guard("orders.create")(create) if GUARDED else create),
    path("openapi.json", lambda _request: JsonResponse({})),
]

application = get_wsgi_application()
