"""The guarded views of Django in ``body_apps``."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import path
from rest_framework.decorators import api_view, parser_classes
from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
from rest_framework.response import Response

from onceward.django import guard
from packages.onceward.tests.support.body_apps import execute


def read_post(get_response: Any) -> Any:
    """Read forms before the guard, as the check of a CSRF token does."""

    def middleware(request: HttpRequest) -> Any:
        if request.path.endswith("/read"):
            request.POST.get("token")
        return get_response(request)

    return middleware


@guard("orders")
def order(request: HttpRequest) -> HttpResponse:
    form = repr(request.POST.dict()).encode()
    execute(form if request.path.endswith("/read") else request.body)
    return HttpResponse("ok", status=201)


@api_view(["POST"])
@parser_classes([JSONParser, FormParser, MultiPartParser])
@guard("rest")
def rest_order(request: Any) -> Response:
    execute(repr(dict(request.data)).encode())
    return Response("ok", status=201)


urlpatterns = [
    path("orders", order),
    path("read", order),
    path("rest", rest_order),
]
