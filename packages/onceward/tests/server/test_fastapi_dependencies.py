"""The guard behind an app's own sign-in and session: claimed after all dependencies have run."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import httpx
import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Header, HTTPException, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from starlette.routing import Route

from onceward import GuardConfig, Onceward, Policy, Principal, Transaction
from onceward.errors import ConfigurationError
from onceward.fastapi import Caller, Run, Session, Tx, the_transaction
from onceward.guard.request import RequestHead
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore
from onceward_testing.servers import RealPostgres


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = mapped_column(primary_key=True)
    token: Mapped[str]
    org: Mapped[str]
    orders_made: Mapped[int] = mapped_column(default=0)


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    org: Mapped[str]
    item: Mapped[str]


class Visit(Base):
    __tablename__ = "visits"

    id: Mapped[int] = mapped_column(primary_key=True)


class NewOrder(BaseModel):
    item: str


class OrderOut(BaseModel):
    id: int
    item: str


class Shop:
    """An app with its own sign-in and its own SQLAlchemy sessions."""

    def __init__(self, url: str, *, guard_first: bool = False, **pool: Any) -> None:
        self.engine = create_async_engine(url, **pool)
        # With SQLAlchemy's default, expire_on_commit=True.
        self.sessions = async_sessionmaker(self.engine)
        self.sign_ins = 0
        self.sent: list[str] = []
        self.app = FastAPI()
        self.onceward = Onceward(
            SqlAlchemyStore(self.sessions),
            config=GuardConfig(sweep_every_seconds=None),
            **(
                {"identify": by_token}
                if guard_first
                else {"principal": self.principal_dependency()}
            ),
        )
        self.onceward.install(self.app)

    def principal_dependency(self) -> Any:
        bearer = HTTPBearer()

        async def current_user(
            session: Session, given: Annotated[HTTPAuthorizationCredentials, Depends(bearer)]
        ) -> User:
            self.sign_ins += 1
            found = await session.scalar(select(User).where(User.token == given.credentials))
            if found is None:
                raise HTTPException(401, "who are you?")
            return found

        async def principal(user: Annotated[User, Depends(current_user)]) -> Principal:
            return Principal(tenant=user.org, actor=str(user.id))

        self.current_user = current_user
        return principal

    async def count(self, model: type[Base]) -> int:
        async with self.sessions() as session:
            return int((await session.scalar(select(func.count()).select_from(model))) or 0)


def by_token(head: RequestHead) -> Principal:
    return Principal(tenant=head.authorization or "mill", actor="someone")


@asynccontextmanager
async def served(shop: Shop) -> AsyncIterator[httpx.AsyncClient]:
    async with shop.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with shop.sessions() as session:
        session.add_all([User(token="ada", org="mill"), User(token="bob", org="dairy")])
        await session.commit()
    await shop.onceward.open()
    transport = httpx.ASGITransport(shop.app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://shop", timeout=60
        ) as client:
            yield client
    finally:
        await shop.onceward.close()
        await shop.engine.dispose()


def sent_by(token: str, key: str | None = "key-1") -> dict[str, str]:
    headers = {"Authorization": f"Bearer {token}"}
    return headers if key is None else headers | {"Idempotency-Key": key}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"
    return str(request.getfixturevalue("postgres_url")).replace("://", "+asyncpg://")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"


def add_orders(shop: Shop) -> None:
    @shop.app.post("/orders", status_code=201, response_model=OrderOut)
    @shop.onceward.guard("orders.create")
    async def create(  # noqa: PLR0917
        order: NewOrder,
        session: Session,
        user: Annotated[User, Depends(shop.current_user)],
        response: Response,
        background: BackgroundTasks,
        run: Run,
    ) -> Order:
        assert session is shop.onceward.transaction
        new = Order(org=user.org, item=order.item)
        session.add(new)
        user.orders_made += 1  # loaded by a dependency, before the claim
        await session.flush()
        run.describe(resource=f"order:{new.id}")
        response.headers["Location"] = f"/orders/{new.id}"
        background.add_task(shop.sent.append, order.item)
        if order.item == "nothing":
            raise HTTPException(409, "sold out")
        return new


# -- claimed after the app's own sign-in -----------------------------------------------------------


async def test_a_replay_is_given_only_after_sign_in(url: str) -> None:
    shop = Shop(url)
    add_orders(shop)
    async with served(shop) as client:
        boots = {"item": "boots"}
        first = await client.post("/orders", json=boots, headers=sent_by("ada"))
        again = await client.post("/orders", json=boots, headers=sent_by("ada"))
        assert first.status_code == 201, first.text
        assert first.json() == {"id": 1, "item": "boots"}
        assert (again.status_code, again.content) == (201, first.content)
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["location"] == first.headers["location"] == "/orders/1"
        assert shop.sign_ins == 2, "once per request"
        assert shop.sent == ["boots"], "a replay runs no background task"

        stranger = await client.post("/orders", json=boots, headers=sent_by("eve"))
        assert (stranger.status_code, stranger.json()) == (401, {"detail": "who are you?"})
        assert "x-request-id" in stranger.headers
        other = await client.post("/orders", json=boots, headers=sent_by("bob"))
        assert other.json() == {"id": 2, "item": "boots"}, "another tenant, another record"

        async with shop.sessions() as session:
            ada = await session.scalar(select(User).where(User.token == "ada"))
            assert ada is not None
            assert ada.orders_made == 1
        [event, _] = await shop.onceward.store.read(
            shop.onceward.store.table_names.render(
                "SELECT actor, resource FROM onceward_audit_events ORDER BY id"
            )
        )
        assert dict(event) == {"actor": "1", "resource": "order:1"}


async def test_what_the_app_refuses_is_not_recorded_and_the_key_stays_free(sqlite_url: str) -> None:
    shop = Shop(sqlite_url)
    add_orders(shop)
    async with served(shop) as client:
        for body, token, status in [
            ({"item": 5}, "ada", 422),
            ({"item": "boots"}, "eve", 401),
            ({"item": "boots"}, "ada", 201),
        ]:
            response = await client.post("/orders", json=body, headers=sent_by(token))
            assert response.status_code == status, response.text
            assert "idempotency-replayed" not in response.headers
        assert await shop.count(Order) == 1


async def test_error_of_the_handler_is_stored_and_replayed_without_its_writes(
    sqlite_url: str,
) -> None:
    shop = Shop(sqlite_url)
    add_orders(shop)
    async with served(shop) as client:
        for replayed in (None, "true"):
            refused = await client.post(
                "/orders", json={"item": "nothing"}, headers=sent_by("ada", "key-2")
            )
            assert refused.status_code == 409
            assert refused.headers.get("idempotency-replayed") == replayed
        assert await shop.count(Order) == 0


async def test_size_and_syntax_of_the_body_are_checked_before_the_sign_in(sqlite_url: str) -> None:
    shop = Shop(sqlite_url)
    add_orders(shop)
    headers = sent_by("eve") | {"Content-Type": "application/json"}
    async with served(shop) as client:
        for body, status, code in [
            (b"x" * (Policy().max_body_bytes + 1), 413, "request.too_large"),
            (b"{", 400, "request.invalid"),
            (b'{"item": "a", "item": "b"}', 400, "request.invalid"),
        ]:
            refused = await client.post("/orders", content=body, headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert shop.sign_ins == 0


async def test_routers_overrides_sync_endpoints_and_mounted_apps(sqlite_url: str) -> None:
    shop = Shop(sqlite_url)
    seen: list[str] = []

    def needs_version(x_version: Annotated[str, Header()]) -> None:
        seen.append(x_version)

    router = APIRouter(prefix="/v1", dependencies=[Depends(needs_version)])

    @router.post("/shelves/{shelf}")
    @shop.onceward.guard()
    def blocking(shelf: str, amount: int = 1) -> dict[str, Any]:
        return {
            "shelf": shelf,
            "amount": amount,
            "actor": shop.onceward.execution.request.principal.actor,
        }

    sub = FastAPI()

    @sub.post("/things")
    @shop.onceward.guard()
    async def thing() -> dict[str, str]:
        return {"id": str(uuid4())}

    shop.app.include_router(router, prefix="/api")
    shop.app.mount("/sub", sub)
    async with served(shop) as client:
        headers = sent_by("ada") | {"X-Version": "3"}
        first = await client.post("/api/v1/shelves/a?amount=2", headers=headers)
        assert first.json() == {"shelf": "a", "amount": 2, "actor": "1"}, first.text
        again = await client.post("/api/v1/shelves/a?amount=2", headers=headers)
        assert again.content == first.content
        assert again.headers["idempotency-replayed"] == "true"
        assert seen == ["3", "3"], "dependencies of the router run on replays too"
        assert (
            await client.post("/api/v1/shelves/a", headers=sent_by("ada", "k2"))
        ).status_code == 422

        mounted = [await client.post("/sub/things", headers=sent_by("ada")) for _ in range(2)]
        assert mounted[0].content == mounted[1].content
        assert (await client.post("/sub/things", headers=sent_by("ada", None))).json()[
            "status"
        ] == 400

        async def pretend() -> User:
            return User(id=7, token="", org="test")

        shop.app.dependency_overrides[shop.current_user] = pretend
        fake = await client.post(
            "/api/v1/shelves/b", headers={**headers, "Authorization": "Bearer x"}
        )
        assert fake.json() == {"shelf": "b", "amount": 1, "actor": "7"}


async def test_openapi_shows_the_security_scheme_and_no_parameter_of_the_guard(
    sqlite_url: str,
) -> None:
    shop = Shop(sqlite_url)
    add_orders(shop)
    operation = shop.app.openapi()["paths"]["/orders"]["post"]
    assert operation["security"] == [{"HTTPBearer": []}]
    assert [p["name"] for p in operation["parameters"]] == ["Idempotency-Key"]
    assert operation["responses"]["422"]["description"] == "Validation Error"
    assert "401" not in operation["responses"], "that one is the app's own"
    await shop.engine.dispose()


# -- what dependencies write -----------------------------------------------------------------------


async def test_writes_of_dependencies_before_the_claim(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Flushed ones are rolled back, committed ones stay, pending ones commit with the record."""
    shop = Shop(url)
    shop.sessions.configure(expire_on_commit=False)  # for the dependency that commits

    async def visit(
        session: Session, how: str, _user: Annotated[User, Depends(shop.current_user)]
    ) -> None:
        session.add(Visit())
        if how == "flush":
            await session.flush()
        elif how == "commit":
            await session.commit()

    @shop.app.post("/visits", dependencies=[Depends(visit)])
    @shop.onceward.guard()
    async def create(user: Annotated[User, Depends(shop.current_user)]) -> str:
        return user.org

    async with served(shop) as client:
        for how, after_first, after_replay in [
            ("flush", 0, 0),
            ("pending", 1, 1),
            ("commit", 2, 3),
        ]:
            for expected in (after_first, after_replay):
                response = await client.post(f"/visits?how={how}", headers=sent_by("ada", how))
                assert (response.status_code, response.json()) == (200, "mill")
                assert await shop.count(Visit) == expected, how
    assert "wrote in Onceward's transaction before the key was claimed" in caplog.text


async def test_plain_sql_of_dependencies_is_rolled_back_and_of_open_routes_committed(
    tmp_path: Path,
) -> None:
    onceward = Onceward(
        f"sqlite:///{tmp_path}/app.db",
        principal=principal_of_header,
        config=GuardConfig(sweep_every_seconds=None),
    )
    app = FastAPI()
    onceward.install(app)

    async def note(tx: Tx) -> Transaction:
        await tx.execute("INSERT INTO notes VALUES ('dependency')")
        return tx

    @app.post("/guarded", status_code=201)
    @onceward.guard()
    async def guarded(before: Annotated[Transaction, Depends(note)], tx: Tx) -> None:
        await tx.execute("INSERT INTO notes VALUES ('handler')")
        await before.execute("INSERT INTO notes VALUES ('handler')")

    @app.post("/open/{status}")
    async def open_route(tx: Tx, status: int) -> None:
        await tx.execute("INSERT INTO notes VALUES ('open')")
        if status >= 400:
            raise HTTPException(status)

    @app.get("/notes")
    async def notes(tx: Tx) -> list[Any]:
        return [row["text"] for row in await tx.fetch_all("SELECT text FROM notes")]

    await onceward.open()
    await onceward.store.write("CREATE TABLE notes (text TEXT)")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        for _ in range(2):
            response = await client.post(
                "/guarded", headers={"X-Org": "mill", "Idempotency-Key": "k"}
            )
            assert response.status_code == 201
            assert (await client.get("/notes")).json() == ["handler", "handler"]
        assert (await client.post("/open/409")).status_code == 409
        assert (await client.get("/notes")).json() == ["handler", "handler"]
        assert (await client.post("/open/200")).status_code == 200
        assert (await client.get("/notes")).json() == ["handler", "handler", "open"]
    await onceward.close()


async def principal_of_header(x_org: Annotated[str, Header()]) -> Principal:
    return Principal(tenant=x_org, actor=x_org)


async def test_caller_and_session_in_a_route_without_a_guard(sqlite_url: str) -> None:
    shop = Shop(sqlite_url, guard_first=True)

    @shop.app.get("/me")
    async def me(caller: Caller, session: Session) -> list[Any]:
        names = await session.scalars(select(User.token).order_by(User.id))
        return [caller.tenant, *names]

    @shop.app.post("/users", status_code=201)
    async def add(session: Session, commit: bool) -> None:
        session.add(User(token="cid", org="mill"))
        await session.flush()
        if commit:
            await session.commit()

    async with served(shop) as client:
        assert (await client.get("/me", headers=sent_by("ada"))).json() == [
            "Bearer ada",
            "ada",
            "bob",
        ]
        for commit, users in [("false", 2), ("true", 3)]:
            assert (await client.post(f"/users?commit={commit}")).status_code == 201
            assert await shop.count(User) == users, "the app commits its session itself"


def is_unavailable(response: httpx.Response) -> bool:
    return (
        response.status_code == 503
        and int(response.headers["Retry-After"]) > 0
        and response.headers["Onceward-Error"] == "idempotency.store_unavailable"
        and response.headers["Content-Type"] == "application/problem+json"
    )


async def test_outage_in_a_session_is_a_503_before_the_claim_and_without_a_guard(
    postgres_url: str, postgres: RealPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(postgres_url.replace("://", "+asyncpg://"))
    add_orders(shop)

    @shop.app.get("/users")
    async def users(session: Session) -> list[str]:
        return list(await session.scalars(select(User.token)))

    @shop.app.get("/careful")
    async def careful(session: Session) -> str:
        try:
            return str(await session.scalar(select(User.token)))
        except (OSError, DBAPIError):
            return "later"

    @shop.app.get("/wrong")
    async def wrong(session: Session, why: str) -> None:
        if why == "own":
            raise ConnectionRefusedError("of another server")
        await session.execute(text("SELECT * FROM nowhere"))

    order: dict[str, Any] = {"json": {"item": "oats"}, "headers": sent_by("ada")}
    async with served(shop) as client:
        for why in ("own", "statement"):
            response = await client.get("/wrong", params={"why": why})
            assert response.status_code == 500, "not an outage of the session"
        postgres.stop("fast")
        try:
            for _ in range(2):
                assert is_unavailable(await client.post("/orders", **order))
                assert is_unavailable(await client.get("/users"))
            assert (await client.get("/careful")).json() == "later"
            response = await client.get("/wrong", params={"why": "own"})
            assert response.status_code == 500
        finally:
            postgres.start()
        assert "the store is unavailable: the database is unavailable" in caplog.text
        assert "'ada'" not in caplog.text
        assert (await client.post("/orders", **order)).status_code == 201
        assert sorted((await client.get("/users")).json()) == ["ada", "bob"]


async def test_outage_in_the_session_of_a_guarded_handler_is_a_503(postgres_url: str) -> None:
    shop = Shop(postgres_url.replace("://", "+asyncpg://"), guard_first=True)

    @shop.app.post("/orders")
    @shop.onceward.guard("orders.create")
    async def create(session: Session) -> None:
        session.add(Order(org="mill", item="oats"))
        await session.flush()
        await session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    async with served(shop) as client:
        assert is_unavailable(await client.post("/orders", headers=sent_by("ada")))
        assert await shop.count(Order) == 0


async def test_caller_beside_a_principal_dependency_names_what_to_write(sqlite_url: str) -> None:
    shop = Shop(sqlite_url)

    @shop.app.get("/me")
    async def me(caller: Caller) -> None:
        raise AssertionError

    async with served(shop) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match=r"GET /me .*Depends"):
            await client.get("/me")


async def test_a_dependency_that_returns_no_principal_is_named(sqlite_url: str) -> None:
    shop = Shop(sqlite_url)

    @shop.app.post("/orders")
    @shop.onceward.guard(principal=shop.current_user)
    async def create() -> None:
        raise AssertionError

    async with served(shop) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
        with pytest.raises(Exception, match=r"returned User.*onceward.Principal"):
            await client.post("/orders", headers=sent_by("ada"))


# -- connections -----------------------------------------------------------------------------------

POOL: dict[str, Any] = {"pool_size": 5, "max_overflow": 0, "pool_timeout": 30}


async def test_waiting_duplicates_hold_no_connection(url: str) -> None:
    shop = Shop(url, **POOL)
    started, gate = asyncio.Event(), asyncio.Event()

    @shop.app.post("/orders", status_code=201)
    @shop.onceward.guard()
    async def create(session: Session) -> None:
        session.add(Order(org="mill", item="boots"))
        await session.flush()
        started.set()
        await gate.wait()

    @shop.app.post("/others", status_code=201)
    @shop.onceward.guard()
    async def other() -> None:
        """Need a connection for the claim and the commit."""

    async with served(shop) as client:
        sending = [
            asyncio.create_task(client.post("/orders", headers=sent_by("ada"))) for _ in range(40)
        ]
        await started.wait()
        while shop.sign_ins < 40 or shop.engine.pool.checkedout() > 1:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        if "postgresql" in url:  # SQLite has one writer at a time
            others = [client.post("/others", headers=sent_by("ada", str(n))) for n in range(8)]
            assert {r.status_code for r in await asyncio.gather(*others)} == {201}
        gate.set()
        responses = await asyncio.gather(*sending)
        assert {r.status_code for r in responses} == {201}
        assert sum("idempotency-replayed" in r.headers for r in responses) == 39
        assert await shop.count(Order) == 1


async def test_waiting_duplicates_hold_no_connection_of_the_postgres_store(
    postgres_url: str,
) -> None:
    from onceward.stores.postgres import PostgresStore

    store = PostgresStore(postgres_url, max_connections=5)
    onceward = Onceward(
        store, principal=principal_of_header, config=GuardConfig(sweep_every_seconds=None)
    )
    app = FastAPI()
    onceward.install(app)
    started, gate, signed_in = asyncio.Event(), asyncio.Event(), 0

    async def sign_in(tx: Tx) -> None:
        nonlocal signed_in
        await tx.fetch_one("SELECT 1 AS one")
        signed_in += 1

    @app.post("/orders", dependencies=[Depends(sign_in)], status_code=201)
    @onceward.guard()
    async def create(tx: Tx) -> None:
        await tx.execute("INSERT INTO orders VALUES (1)")
        started.set()
        await gate.wait()

    await onceward.open()
    await store.write("CREATE TABLE orders (id int)")
    headers = {"X-Org": "mill", "Idempotency-Key": "k"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=60) as client:
        sending = [asyncio.create_task(client.post("/orders", headers=headers)) for _ in range(40)]
        await started.wait()
        while signed_in < 40:
            await asyncio.sleep(0.01)
        reads = [store.read("SELECT 1 AS one") for _ in range(40)]
        async with asyncio.timeout(5):
            await asyncio.gather(*reads)
        gate.set()
        assert {r.status_code for r in await asyncio.gather(*sending)} == {201}
    assert len(await store.read("SELECT id FROM orders")) == 1
    await onceward.close()


@pytest.mark.parametrize(
    ("url", "guard_first", "shares"),
    [
        pytest.param("postgresql", True, False, id="postgresql, identify, own session"),
        pytest.param("postgresql", False, False, id="postgresql, principal, own session"),
        pytest.param("postgresql", False, True, id="postgresql, principal, shared session"),
        pytest.param("sqlite", False, False, id="sqlite, principal, own session"),
    ],
    indirect=["url"],
)
async def test_forty_requests_on_a_pool_of_five_do_not_deadlock(
    url: str, guard_first: bool, shares: bool
) -> None:
    """With its own session, each request holds one connection and needs a second one."""
    shop = Shop(url, guard_first=guard_first, **POOL)

    async def own_session() -> AsyncIterator[AsyncSession]:
        async with shop.sessions() as session:
            yield session

    dependency = the_transaction if shares else own_session

    async def user(session: Annotated[AsyncSession, Depends(dependency)]) -> User | None:
        return await session.get(User, 1)

    @shop.app.post("/orders", status_code=201)
    @shop.onceward.guard("orders.create")
    async def create(by: Annotated[User, Depends(user)], item: str) -> None:
        shop.onceward.transaction.add(Order(org=by.org, item=item))
        await asyncio.sleep(0.01)

    async with served(shop) as client:
        started = time.monotonic()
        responses = await asyncio.gather(
            *(client.post(f"/orders?item={n}", headers=sent_by("ada", str(n))) for n in range(40))
        )
        assert [r.status_code for r in responses] == [201] * 40
        assert await shop.count(Order) == 40
        assert time.monotonic() - started < 15, "a deadlock ends with the pool's time-out, 30 s"


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_forty_stored_errors_on_a_pool_of_five_do_not_deadlock(url: str) -> None:
    """Their records are written after a rollback, while each has its own session open."""
    shop = Shop(url, **POOL)

    async def own_session() -> AsyncIterator[AsyncSession]:
        async with shop.sessions() as session:
            yield session

    async def user(session: Annotated[AsyncSession, Depends(own_session)]) -> User | None:
        return await session.get(User, 1)

    @shop.app.post("/orders")
    @shop.onceward.guard("orders.create")
    async def create(by: Annotated[User, Depends(user)]) -> None:
        raise HTTPException(409, f"sold out, {by.org}")

    async with served(shop) as client:
        started = time.monotonic()
        for is_replay in (False, True):
            responses = await asyncio.gather(
                *(client.post("/orders", headers=sent_by("ada", str(n))) for n in range(40))
            )
            assert [r.status_code for r in responses] == [409] * 40
            assert {"idempotency-replayed" in r.headers for r in responses} == {is_replay}
        assert time.monotonic() - started < 25, "a deadlock ends with the pool's time-out, 30 s"


# -- refused ---------------------------------------------------------------------------------------


async def test_a_principal_dependency_needs_routes_of_fastapi(sqlite_url: str) -> None:
    shop = Shop(sqlite_url)

    async def create(request: Any) -> Response:
        raise AssertionError

    shop.app.router.routes.append(Route("/things", shop.onceward.guard()(create), methods=["POST"]))
    with pytest.raises(ConfigurationError, match="identify"):
        await shop.onceward.open()
    await shop.engine.dispose()


async def test_guard_path_beside_a_principal_dependency_needs_identify(sqlite_url: str) -> None:
    shop = Shop(sqlite_url)
    shop.onceward.guard_path("POST", "/things")
    with pytest.raises(ConfigurationError, match="identify"):
        await shop.onceward.open()
    await shop.engine.dispose()


def test_guard_without_parentheses_is_refused(tmp_path: Path) -> None:
    onceward: Any = Onceward(f"sqlite:///{tmp_path}/shop.db")

    async def create() -> None:
        """Have no effect."""

    with pytest.raises(ConfigurationError, match="with parentheses"):
        onceward.guard(create)


def test_principal_and_identify_together_are_refused(tmp_path: Path) -> None:
    async def principal() -> Principal:
        return Principal(tenant="mill", actor="ada")

    with pytest.raises(ConfigurationError, match="give one of them"):
        Onceward(
            f"sqlite:///{tmp_path}/shop.db",
            principal=principal,
            identify=lambda _head: Principal(tenant="mill", actor="ada"),
        )
