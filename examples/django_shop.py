"""A Django shop in one file. Run: ``python -m examples.django_shop``.

    curl -X POST 'localhost:8000/orders?item=boots' -H X-Token:token-1 -H Idempotency-Key:order-1

The view writes with Django's connection. The guard wraps it in ``transaction.atomic()``, so the
record of the key commits with the order.
"""

import sys

from django.conf import settings

if not settings.configured:
    settings.configure(
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        USE_TZ=True,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django_shop.db"}},
    )

import django

django.setup()

from django.core.management import execute_from_command_line  # noqa: E402 - after the settings
from django.db import connection  # noqa: E402
from django.http import HttpRequest, JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402

from onceward import Principal  # noqa: E402
from onceward.django import guard  # noqa: E402
from onceward.errors import NotAuthenticatedError  # noqa: E402

CUSTOMERS = {"token-1": "ada", "token-2": "bob"}


def customer(request: HttpRequest) -> Principal:
    """Sign in. With AuthenticationMiddleware, ``request.user`` is the caller without this."""
    name = CUSTOMERS.get(request.headers.get("X-Token", ""))
    if name is None:
        raise NotAuthenticatedError("send a valid X-Token")
    return Principal(tenant=name, actor=name)


@guard("orders.place", principal=customer)
def place_order(request: HttpRequest) -> JsonResponse:
    """Write the order as in any Django view."""
    item = request.GET["item"]
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS orders (item TEXT)")
        cursor.execute("INSERT INTO orders (item) VALUES (%s)", [item])
    return JsonResponse({"item": item}, status=201)


urlpatterns = [path("orders", place_order)]

if __name__ == "__main__":
    execute_from_command_line([sys.argv[0], "runserver", "8000", "--noreload"])
