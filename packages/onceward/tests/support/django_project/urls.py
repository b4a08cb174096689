"""Guarded views of every kind. Each writes an order, as a group: no model is needed for it."""

from typing import Any

from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import LoginRequiredMixin, PermissionRequiredMixin
from django.contrib.auth.models import Group
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    JsonResponse,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import SimpleTemplateResponse
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from rest_framework import serializers
from rest_framework.authentication import SessionAuthentication
from rest_framework.decorators import action, api_view, authentication_classes, permission_classes
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.throttling import UserRateThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import ModelViewSet

from onceward import Policy, Principal, ServiceError
from onceward.django import batch, execution, guard

PERMISSION = "auth.add_group"


def write(name: str = "order") -> int:
    count: int = Group.objects.count()
    Group.objects.create(name=f"{name} {count}")
    return count + 1


def made() -> JsonResponse:
    return JsonResponse({"n": write()}, status=201)


# -- functions ---------------------------------------------------------------------------------


@login_required
@guard("function")
def function(request: HttpRequest, do: str = "") -> HttpResponse:
    if request.method == "GET":
        return JsonResponse({"orders": Group.objects.count()})
    response: HttpResponse = made()
    if do == "missing":
        raise Http404("no such shop")
    if do == "crash":
        raise RuntimeError("as asked")
    if do == "refuse":
        raise ServiceError(409, "order.closed", "closed")
    if do == "stream":
        return StreamingHttpResponse(iter([b"a", b"b"]))
    if do == "template":
        template = engines["django"].from_string("<p>{{ n }}</p>")
        return SimpleTemplateResponse(template, {"n": Group.objects.count()})
    if do == "cookies":
        response.set_cookie("one", "1")
        response.set_cookie("two", "2")
    if do == "who":
        principal = execution().request.principal
        return JsonResponse({"tenant": principal.tenant, "actor": principal.actor})
    return response


@guard("public")
def public(request: HttpRequest) -> HttpResponse:
    return made()


def company(request: HttpRequest) -> Principal:
    return Principal(tenant=request.headers["X-Company"], actor="somebody")


@guard("company", principal=company, policy=Policy(key_required=False))
def of_company(request: HttpRequest) -> HttpResponse:
    return made()


@guard("upload", principal=company)
def upload(request: HttpRequest) -> HttpResponse:
    photo = request.FILES.get("photo")
    return JsonResponse(
        {"item": request.POST["item"], "photo": photo.read().decode() if photo else ""}
    )


def not_guarded(request: HttpRequest) -> HttpResponse:
    raise ServiceError(404, "order.unknown", "unknown")


# -- class-based views -------------------------------------------------------------------------


class ByMethod(PermissionRequiredMixin, View):
    permission_required = PERMISSION
    raise_exception = True

    @guard("by_method")
    def post(self, request: HttpRequest) -> HttpResponse:
        return made()

    def put(self, request: HttpRequest) -> HttpResponse:
        return JsonResponse({"put": True})


@guard("whole_class")
class WholeClass(PermissionRequiredMixin, View):
    permission_required = PERMISSION
    raise_exception = True

    def get(self, request: HttpRequest) -> HttpResponse:
        return JsonResponse({"got": True})

    def post(self, request: HttpRequest) -> HttpResponse:
        return made()

    def put(self, request: HttpRequest) -> HttpResponse:
        return made()


@method_decorator(guard("on_dispatch"), name="dispatch")
class OnDispatch(PermissionRequiredMixin, View):
    permission_required = PERMISSION
    raise_exception = True

    def post(self, request: HttpRequest) -> HttpResponse:
        return made()


@method_decorator(guard("decorated_method"), name="post")
class DecoratedMethod(PermissionRequiredMixin, View):
    permission_required = PERMISSION
    raise_exception = True

    def post(self, request: HttpRequest) -> HttpResponse:
        return made()


class WithLogin(LoginRequiredMixin, View):
    @guard("with_login")
    def post(self, request: HttpRequest) -> HttpResponse:
        return made()


# -- Django REST framework ---------------------------------------------------------------------


class MayAdd(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return bool(request.user.is_authenticated and request.user.has_perm(PERMISSION))


class ReadsDataFirst(MayAdd):
    def has_permission(self, request: Any, view: Any) -> bool:
        return "name" in request.data and super().has_permission(request, view)


class SessionWithoutCsrf(SessionAuthentication):
    def enforce_csrf(self, request: Any) -> None:
        """The tests are about permissions."""


class ThreePerDay(UserRateThrottle):
    rate = "3/day"
    scope = "three"


class RestView(APIView):
    authentication_classes = (SessionWithoutCsrf,)
    permission_classes = (MayAdd,)

    @guard("rest.view")
    def post(self, request: Request) -> Response:
        return Response({"n": write()}, status=201)


class Throttled(APIView):
    authentication_classes = (SessionWithoutCsrf,)
    throttle_classes = (ThreePerDay,)

    @guard("rest.throttled")
    def post(self, request: Request) -> Response:
        return Response({"n": write()}, status=201)


class Orders(serializers.ModelSerializer):
    class Meta:
        model = Group
        fields = ("id", "name")


class OrderViewSet(ModelViewSet):
    queryset = Group.objects.order_by("id")
    serializer_class = Orders
    authentication_classes = (SessionWithoutCsrf,)
    permission_classes = (MayAdd,)

    @guard("viewset.create")
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return super().create(request, *args, **kwargs)

    @action(detail=True, methods=["post"])
    @guard("viewset.pay")
    def pay(self, request: Request, pk: str) -> Response:
        return Response({"paid": self.get_object().name, "n": write()})


@guard()
class WholeViewSet(OrderViewSet):
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return super(OrderViewSet, self).create(request, *args, **kwargs)

    @action(detail=True, methods=["post"], permission_classes=[ReadsDataFirst])
    def pay(self, request: Request, pk: str) -> Response:
        return Response({"paid": request.data["name"], "n": write()})


@api_view(["POST"])
@authentication_classes([SessionWithoutCsrf])
@permission_classes([MayAdd])
@guard("rest.function")
def rest_function(request: Request) -> Response:
    return Response({"n": write(), "item": request.data["item"]}, status=201)


@api_view(["POST"])
@authentication_classes([SessionWithoutCsrf])
@permission_classes([IsAuthenticated])
@guard("rest.function")
def same_name(request: Request) -> Response:
    return Response({})


router = SimpleRouter()
router.register("orders", OrderViewSet, basename="orders")
router.register("whole", WholeViewSet, basename="whole")

urlpatterns = [
    path("v1/batch", batch),
    path("function", csrf_exempt(function)),
    path("function/<str:do>", csrf_exempt(function)),
    path("public", csrf_exempt(public)),
    path("company", csrf_exempt(of_company)),
    path("upload", upload),
    path("open", not_guarded),
    path("by-method", csrf_exempt(ByMethod.as_view())),
    path("whole-class", csrf_exempt(WholeClass.as_view())),
    path("on-dispatch", csrf_exempt(OnDispatch.as_view())),
    path("decorated-method", csrf_exempt(DecoratedMethod.as_view())),
    path("with-login", csrf_exempt(WithLogin.as_view())),
    path("rest/view", RestView.as_view()),
    path("rest/throttled", Throttled.as_view()),
    path("rest/function", rest_function),
    path("rest/same-name", same_name),
    path("rest/", include(router.urls)),
]
