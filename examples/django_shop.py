"""A Django shop in one file. Run: ``python -m examples.django_shop``.

    curl -X POST 'localhost:8000/orders?item=boots' -H 'Idempotency-Key: my-first-order'

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
        # No one signs in here. A project with AuthenticationMiddleware leaves this out.
        HOLDFAST={"TENANTS": "holdfast.SINGLE_TENANT"},
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django_shop.db"}},
    )

import django

django.setup()

from django.core.management import execute_from_command_line  # noqa: E402 - after the settings
from django.db import connection  # noqa: E402
from django.http import HttpRequest, JsonResponse  # noqa: E402
from django.urls import path  # noqa: E402

from holdfast.django import guard  # noqa: E402


@guard("orders.place")
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
