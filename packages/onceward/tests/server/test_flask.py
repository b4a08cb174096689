"""``FlaskGuard``: the decision is taken around the view, after the app's own sign-in."""

import io
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import httpx
import pytest
from flask import (
    Blueprint,
    Flask,
    Response,
    abort,
    g,
    redirect,
    request,
    send_file,
    stream_with_context,
)
from flask.testing import FlaskClient
from flask.views import MethodView
from flask_login import LoginManager, UserMixin, login_required, login_user, logout_user

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Policy, Principal, ServiceError
from onceward.errors import (
    ConfigurationError,
    NoTransactionError,
    ResponseTooLargeError,
    StoreUnavailableError,
    StreamingResponseError,
)
from onceward.flask import FlaskGuard
from onceward_testing.in_process_client import Request as Sent
from onceward_testing.in_process_client import WsgiClient
from packages.onceward.tests.support.serving import ROOT, free_port

KEY = {"Idempotency-Key": "key-1"}
Shop = tuple[Flask, FlaskGuard]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    yield from make_shop(tmp_path, tenants=SINGLE_TENANT)


@pytest.fixture
def shop_without_callers(tmp_path: Path) -> Iterator[Shop]:
    """A shop whose Onceward does not say who the callers are."""
    yield from make_shop(tmp_path)


def make_shop(tmp_path: Path, **options: Any) -> Iterator[Shop]:
    app = Flask(__name__)
    app.secret_key = "for tests"
    app.testing = True  # exceptions of views are raised in the test
    onceward = Onceward(
        f"sqlite:///{tmp_path}/shop.db", config=GuardConfig(sweep_every_seconds=None), **options
    )
    guard = FlaskGuard(onceward, app)
    yield app, guard
    guard.close()


def write(guard: FlaskGuard, item: str = "boots") -> int:
    """Insert an order; return how many there are."""
    guard.transaction.execute("CREATE TABLE IF NOT EXISTS orders (item TEXT)")
    guard.transaction.execute("INSERT INTO orders VALUES (:item)", {"item": item})
    row = guard.transaction.fetch_one("SELECT count(*) AS n FROM orders")
    return int(row["n"])


def is_replay(response: Any) -> bool:
    replayed: str | None = response.headers.get("Idempotency-Replayed")
    return replayed == "true"


# -- the app's own sign-in ---------------------------------------------------------------------


def with_login(shop: Shop) -> FlaskClient:
    """Add Flask-Login and one guarded view, behind ``@login_required``."""
    app, guard = shop
    manager = LoginManager(app)

    @manager.user_loader
    def load(user_id: str) -> UserMixin:
        user = UserMixin()
        user.id = user_id
        return user

    @app.post("/login/<name>")
    def login(name: str) -> str:
        login_user(load(name))
        return "in"

    @app.post("/logout")
    def logout() -> str:
        logout_user()
        return "out"

    @app.post("/orders")
    @login_required
    @guard("orders.create")
    def create() -> Any:
        principal = guard.execution.request.principal
        return {"n": write(guard), "tenant": principal.tenant, "actor": principal.actor}, 201

    @app.post("/public")
    @guard("orders.public")
    def public() -> Any:
        return {"n": write(guard)}, 201

    return app.test_client()


def test_replay_needs_the_sign_in_of_flask_login(shop_without_callers: Shop) -> None:
    client = with_login(shop_without_callers)
    client.post("/login/ann")
    first = client.post("/orders", headers=KEY)
    assert (first.status_code, first.json) == (201, {"n": 1, "tenant": "ann", "actor": "ann"})
    again = client.post("/orders", headers=KEY)
    assert again.data == first.data
    assert is_replay(again)
    client.post("/logout")
    refused = client.post("/orders", headers=KEY)
    assert refused.status_code == 401
    assert not refused.is_json  # the app's own response
    client.post("/login/bob")
    other = client.post("/orders", headers=KEY)
    assert other.json == {"n": 2, "tenant": "bob", "actor": "bob"}


def test_anonymous_caller_of_a_guarded_view_without_login_required_gets_401(
    shop_without_callers: Shop,
) -> None:
    client = with_login(shop_without_callers)
    refused = client.post("/public", headers=KEY)
    assert (refused.status_code, refused.json["code"]) == (401, "auth.required")  # type: ignore[index]


def test_users_of_flask_login_without_an_id_do_not_share_a_tenant(
    shop_without_callers: Shop,
) -> None:
    class Service(UserMixin):
        def get_id(self) -> Any:
            return None

    app, guard = shop_without_callers
    LoginManager(app).request_loader(lambda _request: Service())
    app.add_url_rule("/a", "a", guard("a")(lambda: "a"), methods=["POST"])
    with pytest.raises(ConfigurationError, match="has no id"):
        app.test_client().post("/a", headers=KEY)


def test_before_request_hooks_and_g_decide_before_the_guard(shop: Shop) -> None:
    app, guard = shop
    allowed = {"t1": "acme", "t2": "acme", "t3": "other"}
    api = Blueprint("api", __name__, url_prefix="/api")

    @api.before_request
    def sign_in() -> Any:
        g.company = allowed.get(request.headers.get("X-Token", ""))
        g.token = request.headers.get("X-Token")
        return None if g.company else ({"own": "refusal"}, 403)

    def principal() -> Principal:
        return Principal(tenant=g.company, actor=g.token)

    @api.post("/orders/<int:number>")
    @guard(principal=principal)
    def create(number: int) -> Any:
        return {"n": write(guard), "number": number}, 201

    app.register_blueprint(api)
    client = app.test_client()
    first = client.post("/api/orders/1", headers=KEY | {"X-Token": "t1"})
    assert first.status_code == 201
    # A colleague is the same tenant; another path is another request; another company is another.
    assert is_replay(client.post("/api/orders/1", headers=KEY | {"X-Token": "t2"}))
    assert client.post("/api/orders/2", headers=KEY | {"X-Token": "t1"}).status_code == 409
    assert client.post("/api/orders/1", headers=KEY | {"X-Token": "t3"}).json == {
        "n": 2,
        "number": 1,
    }
    del allowed["t1"]
    refused = client.post("/api/orders/1", headers=KEY | {"X-Token": "t1"})
    assert (refused.status_code, refused.json) == (403, {"own": "refusal"})


def test_principal_may_respond_with_an_error_of_the_app(shop: Shop) -> None:
    app, guard = shop

    @app.post("/orders")
    @guard(principal=lambda: abort(418))
    def create() -> Any:
        return {}

    assert app.test_client().post("/orders", headers=KEY).status_code == 418


def test_principal_that_is_none_is_an_error_not_a_shared_tenant(shop: Shop) -> None:
    app, guard = shop

    @app.post("/orders")
    @guard(principal=lambda: None)  # type: ignore[arg-type, return-value]
    def create() -> Any:
        return {}

    with pytest.raises(ConfigurationError, match="must be a Principal"):
        app.test_client().post("/orders", headers=KEY)


# -- kinds of views ----------------------------------------------------------------------------


def test_method_views_are_guarded_as_a_whole_and_by_method(shop: Shop) -> None:
    app, guard = shop

    class Whole(MethodView):
        decorators = [guard("whole")]  # noqa: RUF012 - as Flask has it

        def get(self) -> Any:
            return {"get": True}

        def post(self) -> Any:
            return {"n": write(guard)}, 201

    class ByMethod(MethodView):
        @guard("by_method")
        def post(self, name: str) -> Any:
            return {"n": write(guard, name)}, 201

        def put(self, name: str) -> Any:
            return {"name": name}

    app.add_url_rule("/whole", view_func=Whole.as_view("whole"))
    app.add_url_rule("/by/<name>", view_func=ByMethod.as_view("by_method"))
    client = app.test_client()
    assert client.get("/whole").json == {"get": True}
    assert client.put("/by/x").json == {"name": "x"}
    for path in ("/whole", "/by/x"):
        first = client.post(path, headers=KEY)
        again = client.post(path, headers=KEY)
        assert (first.status_code, again.data, is_replay(again)) == (201, first.data, True)
        assert client.post(path).json["code"] == "idempotency.key_required"  # type: ignore[index]


def test_guarded_class_covers_its_methods_and_subclasses_below_their_decorators(
    shop: Shop,
) -> None:
    app, guard = shop
    order: list[str] = []

    def noting(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def noted(**kwargs: Any) -> Any:
            order.append("decorator")
            return view(**kwargs)

        return noted

    @guard("orders")
    class Orders(MethodView):
        def get(self, name: str) -> Any:
            return {"got": name}

        def post(self, name: str) -> Any:
            return {"n": write(guard, name)}, 201

    class Others(Orders):
        decorators = (noting,)  # type: ignore[assignment]

        async def post(self, name: str) -> Any:
            order.append("view")
            return {"n": write(guard, name)}, 201

    app.add_url_rule("/orders/<name>", view_func=Orders.as_view("orders"))
    app.add_url_rule("/others/<name>", view_func=Others.as_view("others"))
    client = app.test_client()
    assert client.get("/orders/x").json == {"got": "x"}
    for path, expected in (("/orders/x", []), ("/others/x", ["decorator", "view", "decorator"])):
        headers = {"Idempotency-Key": f"key-of{path}"}
        first, again = (client.post(path, headers=headers) for _ in range(2))
        assert (first.status_code, again.data, is_replay(again)) == (201, first.data, True)
        assert order == expected
    # One name for both: no response of one class is replayed by the other.
    assert (
        client.post("/others/x", headers={"Idempotency-Key": "key-of/orders/x"}).status_code == 409
    )


def test_file_is_stored_and_replayed(shop: Shop) -> None:
    app, guard = shop

    def send() -> Any:
        return send_file(__file__, mimetype="text/plain")

    app.add_url_rule("/file", "file", guard("file")(send), methods=["POST"])
    small = Policy(max_response_bytes=9)
    app.add_url_rule("/large", "large", guard("large", policy=small)(send), methods=["POST"])
    client = app.test_client()
    first, again = (client.post("/file", headers=KEY) for _ in range(2))
    assert (first.status_code, first.data) == (200, Path(__file__).read_bytes())
    assert first.headers["Content-Disposition"].startswith("inline")
    assert (again.data, is_replay(again)) == (first.data, True)
    with pytest.raises(ResponseTooLargeError, match="more than 9 bytes"):
        client.post("/large", headers=KEY)


SERVED = """
from flask import Flask, send_file
from onceward import SINGLE_TENANT, Onceward, Policy
from onceward.flask import FlaskGuard

app = Flask(__name__)
onceward = Onceward("sqlite:///served.db", tenants=SINGLE_TENANT, policy=Policy(key_required=False))
guard = FlaskGuard(onceward, app)

@app.post("/file")
@guard("file")
def file():
    response = send_file(__file__)
    response.set_cookie("a", "1")
    response.set_cookie("b", "2")
    return response
"""


def test_files_cookies_and_empty_keys_on_gunicorn(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    port = free_port()
    command = ["gunicorn", "served:app", f"--bind=127.0.0.1:{port}", "--no-control-socket"]
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{ROOT}/packages/onceward/src:{tmp_path}", "HOME": str(tmp_path)},
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    refused = client.post("/file", headers={"Idempotency-Key": ""})
                    break
                except httpx.TransportError:
                    assert process.poll() is None, (tmp_path / "log.txt").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            assert (refused.status_code, refused.json()["code"]) == (400, "idempotency.key_invalid")
            first, again = (client.post("/file", headers=KEY) for _ in range(2))
            assert (first.status_code, first.text) == (200, SERVED)
            assert first.headers.get_list("Set-Cookie") == ["a=1; Path=/", "b=2; Path=/"]
            assert (again.text, is_replay(again)) == (SERVED, True)
    finally:
        process.terminate()
        process.wait(20)


def test_async_views_are_guarded(shop: Shop) -> None:
    app, guard = shop

    @app.post("/orders")
    @guard()
    async def create() -> Any:
        return {"n": write(guard)}, 201

    client = app.test_client()
    assert client.post("/orders", headers=KEY).json == {"n": 1}
    assert is_replay(client.post("/orders", headers=KEY))


def test_after_request_hooks_run_on_replays_too(shop: Shop) -> None:
    app, guard = shop

    @app.post("/orders")
    @guard()
    def create() -> Any:
        return "made"

    @app.after_request
    def stamp(response: Response) -> Response:
        response.headers["X-Stamp"] = "yes"
        return response

    client = app.test_client()
    for replayed in (False, True):
        response = client.post("/orders", headers=KEY)
        assert (response.data, response.headers["X-Stamp"]) == (b"made", "yes")
        assert is_replay(response) is replayed


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("propagate", [None, True])
def test_onceward_errors_become_responses_without_settings(
    shop: Shop, propagate: bool | None
) -> None:
    app, _ = shop
    app.config["PROPAGATE_EXCEPTIONS"] = propagate

    @app.get("/open")
    def not_guarded() -> Any:
        if "down" in request.args:
            raise StoreUnavailableError("db-7 is down")
        raise ServiceError(404, "order.unknown", "no such order")

    client = app.test_client()
    unknown = client.get("/open", headers={"X-Request-ID": "mine"})
    assert (unknown.status_code, unknown.json["requestId"]) == (404, "mine")  # type: ignore[index]
    assert unknown.headers["X-Request-ID"] == "mine"
    down = client.get("/open?down=1")
    assert (down.status_code, down.headers["Retry-After"]) == (503, "1")
    assert b"db-7" not in down.data


def test_errors_of_the_app_are_stored_and_roll_back(shop: Shop) -> None:
    app, guard = shop

    class OutOfStockError(Exception):
        pass

    @app.errorhandler(OutOfStockError)
    def out_of_stock(_: OutOfStockError) -> Any:
        return {"own": "out of stock"}, 422

    @app.post("/orders/<do>")
    @guard()
    def create(do: str) -> Any:
        n = write(guard)
        if do == "abort":
            abort(404)
        if do == "stock":
            raise OutOfStockError
        if do == "crash":
            raise RuntimeError("as asked")
        return {"n": n}, 201

    client = app.test_client()
    for do, status in (("abort", 404), ("stock", 422)):
        first = client.post(f"/orders/{do}", headers={"Idempotency-Key": do})
        again = client.post(f"/orders/{do}", headers={"Idempotency-Key": do})
        assert (first.status_code, again.data, is_replay(again)) == (status, first.data, True)
    with pytest.raises(RuntimeError, match="as asked"):
        client.post("/orders/crash", headers=KEY)
    assert client.post("/orders/fine", headers=KEY).json == {"n": 1}


def test_error_format_of_the_app_is_used_in_views_without_a_guard(tmp_path: Path) -> None:
    app = Flask(__name__)
    onceward = Onceward(
        f"sqlite:///{tmp_path}/shop.db",
        tenants=SINGLE_TENANT,
        config=GuardConfig(error_format=lambda error: {"fault": error.code}),
    )
    FlaskGuard(onceward, app)

    @app.get("/open")
    def not_guarded() -> Any:
        raise ServiceError(404, "order.unknown", "unknown")

    assert app.test_client().get("/open").json == {"fault": "order.unknown"}


# -- bodies and keys ---------------------------------------------------------------------------


def test_form_that_a_hook_has_read_is_compared_by_its_fields_and_files(shop: Shop) -> None:
    app, guard = shop

    @app.before_request
    def check_token() -> None:
        request.form.get("csrf_token")

    @app.post("/orders")
    @guard()
    def create() -> Any:
        file = request.files.get("photo")
        return {"form": request.form["item"], "file": file.read().decode() if file else ""}, 201

    client = app.test_client()

    def post(item: str, photo: str | None = None) -> Any:
        data: dict[str, Any] = {"item": item}
        if photo is not None:
            data["photo"] = (io.BytesIO(photo.encode()), "photo.txt")
        headers = {"Idempotency-Key": "with" if photo else "without"}
        return client.post("/orders", data=data, headers=headers)

    assert post("boots").json == {"form": "boots", "file": ""}
    assert is_replay(post("boots"))
    assert post("shoes").status_code == 409
    assert post("boots", "red").json == {"form": "boots", "file": "red"}
    assert is_replay(post("boots", "red"))  # with another boundary
    assert post("boots", "blue").status_code == 409


def test_body_that_a_hook_has_consumed_is_an_error_not_an_empty_body(shop: Shop) -> None:
    app, guard = shop

    @app.before_request
    def consume() -> None:
        request.stream.read()

    @app.post("/orders")
    @guard()
    def create() -> Any:
        return {}

    with pytest.raises(ConfigurationError, match=r"read before its guard.*get_data"):
        app.test_client().post("/orders", data=b"{}", headers=KEY)


def test_chunked_body_over_the_limit_of_the_app_gets_the_response_of_the_app(shop: Shop) -> None:
    app, guard = shop
    app.config["MAX_CONTENT_LENGTH"] = 10

    @app.post("/orders")
    @guard()
    def create() -> Any:
        return {"got": request.get_data(as_text=True)}, 201

    @app.errorhandler(413)
    def too_large(_: Exception) -> Any:
        return {"own": "too large"}, 413

    def send(body: bytes) -> Any:
        sent = Sent("POST", "/orders", tuple(KEY.items()), (body,), declared=None)
        response = WsgiClient(app).send(sent)
        return response.status, response.json()

    assert send(b"x" * 11) == (413, {"own": "too large"})
    assert send(b"x" * 10) == (201, {"got": "x" * 10})


# -- mistakes ----------------------------------------------------------------------------------


def stream() -> Any:
    return Response(stream_with_context(iter(["a", "b"])))


@pytest.mark.parametrize(
    ("register", "line"),
    [
        (lambda _app, guard: guard(lambda: None), "with parentheses"),
        (lambda _app, guard: [guard("a")(one) for one in (stream, write)], "both guarded as 'a'"),
        (
            lambda _app, guard: guard(policy=Policy(rate_limit="5/minute"))(stream),
            "no limiter is configured",
        ),
        (lambda _app, guard: guard("a", policy={"key_required": False}), "must be a Policy"),
        (lambda _app, guard: guard.onceward.guard(policy={"audit": True}), "must be a Policy"),
        (lambda app, _guard: FlaskGuard(app), "needs a Onceward"),
        (lambda _app, guard: guard("a")(_GetView), "_GetView is guarded, but is no view"),
        (
            lambda _app, guard: type("V", (MethodView,), {"get": guard()(_GetView.get)}),
            "serves GET",
        ),
    ],
)
def test_mistakes_are_refused_when_the_view_is_defined(
    shop: Shop, register: Callable[..., Any], line: str
) -> None:
    with pytest.raises(ConfigurationError, match=line):
        register(*shop)


class _GetView:
    def get(self) -> Any:
        return {}


def generate() -> Any:
    yield b"a"


def test_view_with_a_yield_is_refused_when_it_is_defined(shop: Shop) -> None:
    with pytest.raises(StreamingResponseError, match=r"generate is guarded and has a yield"):
        shop[1]("a")(generate)


def test_mistakes_are_refused_at_first_use(shop: Shop) -> None:
    app, guard = shop
    app.add_url_rule("/stream", view_func=guard()(stream), methods=["POST"])
    app.add_url_rule("/get", "get", guard("get")(lambda: "got"), methods=["GET"])
    client = app.test_client()
    with pytest.raises(StreamingResponseError, match="streams its response"):
        client.post("/stream", headers=KEY)
    with pytest.raises(ConfigurationError, match="/get is guarded, but a GET must not write"):
        client.get("/get")
    with pytest.raises(NoTransactionError, match="guard the operation first"):
        _ = guard.transaction


# -- one view, several routes ------------------------------------------------------------------


def test_named_view_does_not_replay_across_its_routes(shop: Shop) -> None:
    app, guard = shop
    api = Blueprint("api", __name__)

    @app.post("/two/b")
    @app.post("/two/a")
    @guard("two")
    def two() -> str:
        return request.path

    @api.post("/orders")
    @guard("api.orders")
    def orders() -> str:
        return request.path

    class Pay(MethodView):
        @guard("pay")
        def post(self) -> str:
            return request.path

    app.register_blueprint(api, url_prefix="/v1")
    app.register_blueprint(api, url_prefix="/v2", name="api2")
    app.add_url_rule("/pay/a", view_func=Pay.as_view("pay_a"))
    app.add_url_rule("/pay/b", view_func=Pay.as_view("pay_b"))
    client = app.test_client()
    for number, (one, other) in enumerate(
        [("/two/a", "/two/b"), ("/v1/orders", "/v2/orders"), ("/pay/b", "/pay/a")]
    ):
        headers = {"Idempotency-Key": f"key-{number}"}
        assert client.post(one, headers=headers).text == one
        assert is_replay(client.post(one, headers=headers))
        refused = client.post(other, headers=headers)
        assert refused.status_code == 409, (other, refused.text)
        assert refused.json["code"] == "idempotency.payload_mismatch"  # type: ignore[index]
        assert client.post(other, headers={"Idempotency-Key": f"b-{number}"}).text == other


def test_route_added_to_a_named_view_does_not_change_the_records_of_the_first(
    tmp_path: Path,
) -> None:
    for paths in (["/orders"], ["/orders", "/v2/orders"]):
        app = Flask(__name__)
        guard = FlaskGuard(Onceward(f"sqlite:///{tmp_path}/shop.db", tenants=SINGLE_TENANT), app)
        view = guard("orders.create")(lambda: "ordered")
        for path in paths:
            app.add_url_rule(path, "orders", view, methods=["POST"])
        response = app.test_client().post("/orders", headers=KEY)
        assert is_replay(response) is (len(paths) == 2)
        guard.close()


@pytest.mark.parametrize("in_blueprint", [False, True])
def test_guard_above_the_route_is_refused_at_the_first_request(
    shop: Shop, *, in_blueprint: bool
) -> None:
    app, guard = shop
    router: Any = Blueprint("late", __name__) if in_blueprint else app

    @guard("orders.create")
    @router.post("/orders")
    def create_order() -> str:
        return "ordered"

    @app.get("/health")
    def health() -> str:
        return "well"

    if in_blueprint:
        app.register_blueprint(router)
    for send in (app.test_client().post, app.test_client().get):
        with pytest.raises(ConfigurationError, match=r"create_order .*\n?.*below"):
            send("/orders" if send is app.test_client().post else "/health")


def test_guarded_view_below_a_decorator_without_wraps_and_unused_guards_are_accepted(
    shop: Shop,
) -> None:
    app, guard = shop

    def plain(function: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            return function()

        return wrapped

    def create_order() -> str:
        return "ordered"

    app.add_url_rule("/a", "a", plain(guard("a")(create_order)), methods=["POST"])
    app.add_url_rule("/b", "b", plain(guard("b")(lambda: "b")), methods=["POST"])
    guard("unused")(stream)
    assert app.test_client().post("/a", headers=KEY).text == "ordered"
    assert app.test_client().post("/b", headers=KEY).text == "b"


# -- app factories -----------------------------------------------------------------------------

shared_guard = FlaskGuard()
shared_blueprint = Blueprint("shared", __name__)


@shared_blueprint.post("/orders")
@shared_guard("orders.create")
def shared_create() -> Any:
    return {"n": write(shared_guard)}, 201


def test_module_level_guard_serves_each_app_of_a_factory_with_its_own_onceward(
    tmp_path: Path,
) -> None:
    apps = []
    for name in ("one", "two"):
        app = Flask(__name__)
        app.testing = True
        with app.app_context():
            shared_guard.init_app(
                app, Onceward(f"sqlite:///{tmp_path}/{name}.db", tenants=SINGLE_TENANT)
            )
        app.register_blueprint(shared_blueprint)
        apps.append(app)
    for app in apps:
        first, again = (app.test_client().post("/orders", headers=KEY) for _ in range(2))
        assert (first.json, is_replay(first)) == ({"n": 1}, False)
        assert (again.json, is_replay(again)) == ({"n": 1}, True)
    assert apps[0].extensions["onceward"].onceward is not apps[1].extensions["onceward"].onceward
    shared_guard.close()
    bare = Flask(__name__)
    bare.testing = True
    bare.register_blueprint(shared_blueprint)
    with pytest.raises(ConfigurationError, match=r"guard.init_app\(app, Onceward\(store\)\)"):
        bare.test_client().post("/orders", headers=KEY)


NO_CALLER = r"principal=….*Flask-Login.*SINGLE_TENANT"


def test_app_that_does_not_say_who_calls_is_refused_at_its_first_request(
    shop_without_callers: Shop,
) -> None:
    app, guard = shop_without_callers
    app.add_url_rule("/health", "health", lambda: "well")
    own = guard("own", principal=lambda: Principal("a", "b"))(stream)
    app.add_url_rule("/own", "own", own, methods=["POST"])
    guard("elsewhere")(lambda: "not a view of this app")
    assert app.test_client().get("/health").text == "well"
    other = Flask(__name__)
    other.testing = True
    guard.init_app(other)
    other.add_url_rule("/health", "health", lambda: "well")
    other.add_url_rule("/a", "a", guard("a")(lambda: "a"), methods=["POST"])
    with pytest.raises(ConfigurationError, match=NO_CALLER):
        other.test_client().get("/health")


def test_principal_and_single_tenant_together_are_refused(shop: Shop) -> None:
    app, guard = shop
    with pytest.raises(ConfigurationError, match="give one of them"):
        FlaskGuard(guard.onceward, app, principal=lambda: Principal("a", "b"))


def test_view_that_a_decorator_hides_is_refused_when_it_is_called(
    shop_without_callers: Shop,
) -> None:
    app, guard = shop_without_callers
    view = guard("a")(lambda: "a")

    def hidden() -> Any:
        return view()

    app.add_url_rule("/a", "a", hidden, methods=["POST"])
    with pytest.raises(ConfigurationError, match=NO_CALLER):
        app.test_client().post("/a", headers=KEY)


def test_what_is_for_asgi_apps_is_refused_with_what_flask_needs(shop: Shop) -> None:
    app, guard = shop
    onceward = guard.onceward
    for refused in (onceward.install, onceward.wrap):
        with pytest.raises(ConfigurationError, match=r"FlaskGuard\(onceward, app\)"):
            refused(app)
    with pytest.raises(ConfigurationError, match="WsgiGuard"):
        onceward.wrap(app.wsgi_app)
    app.add_url_rule("/a", "a", onceward.guard("a")(stream), methods=["POST"])
    with pytest.raises(ConfigurationError, match="FlaskGuard"):
        app.test_client().post("/a", headers=KEY)


def test_redirect_of_flask_login_below_the_guard_frees_the_key(shop: Shop) -> None:
    app, guard = shop
    manager = LoginManager(app)
    manager.login_view = "/enter"

    @app.post("/forms")
    @guard("forms", policy=Policy(redirects_stored={302}))  # above the decorator: a common mistake
    def form() -> Any:
        if "X-Sign-In" not in request.headers:
            return manager.unauthorized()
        return redirect(f"/orders/{write(guard)}")

    client, done = app.test_client(), KEY | {"X-Sign-In": "1"}
    signed_out = client.post("/forms", headers=KEY)
    assert (signed_out.status_code, signed_out.location) == (302, "/enter?next=%2Fforms")
    first, again = client.post("/forms", headers=done), client.post("/forms", headers=done)
    assert (first.status_code, first.location, is_replay(first)) == (302, "/orders/1", False)
    assert (again.location, is_replay(again)) == ("/orders/1", True)
