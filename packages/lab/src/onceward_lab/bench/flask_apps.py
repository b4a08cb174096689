"""The Flask apps under load: the same view bare and guarded, each with one insert and one commit.

Each runs in one gunicorn worker with 16 threads and 16 database connections.
"""

import os
import uuid
from typing import Any

from flask import Flask, request
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from onceward import SINGLE_TENANT, Onceward
from onceward.flask import FlaskGuard
from onceward.stores.psycopg import PsycopgSyncStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore

CONNECTIONS = 16
INSERT = "INSERT INTO orders (id, item, quantity) VALUES (:id, :item, :quantity)"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(primary_key=True)
    item: Mapped[str]
    quantity: Mapped[int]


def _url() -> str:
    return os.environ["BENCH_DATABASE"]


def _app() -> Flask:
    app = Flask(__name__)
    app.get("/openapi.json")(dict)  # by which the benchmark sees that the server is up
    return app


def _sessions() -> sessionmaker[Session]:
    url = _url().replace("postgresql", "postgresql+psycopg", 1)
    return sessionmaker(create_engine(url, pool_size=CONNECTIONS), expire_on_commit=False)


def _order() -> Order:
    body = request.get_json()
    return Order(id=str(uuid.uuid4()), item=body["item"], quantity=body["quantity"])


def _created(order: Order) -> Any:
    return {"id": order.id, "item": order.item}, 201


def bare_sqlalchemy() -> Flask:
    """The bare view with a sync session, as in SQLAlchemy's documentation."""
    app, sessions = _app(), _sessions()

    @app.post("/orders")
    def create() -> Any:
        order = _order()
        with sessions() as session, session.begin():
            session.add(order)
        return _created(order)

    return app


def guarded_sqlalchemy() -> Flask:
    app = _app()
    onceward = Onceward(SqlAlchemySyncStore(_sessions()), tenants=SINGLE_TENANT)
    guard = FlaskGuard(onceward, app)

    @app.post("/orders")
    @guard("orders.create")
    def create() -> Any:
        order = _order()
        onceward.transaction.add(order)
        return _created(order)

    return app


def bare_psycopg() -> Flask:
    """The bare view with psycopg's pool, as in its documentation."""
    from psycopg_pool import ConnectionPool

    app = _app()
    pool = ConnectionPool(_url(), min_size=CONNECTIONS, max_size=CONNECTIONS, open=True)

    @app.post("/orders")
    def create() -> Any:
        order = _order()
        values = (order.id, order.item, order.quantity)
        with pool.connection() as connection:
            connection.execute("INSERT INTO orders VALUES (%s, %s, %s)", values)
        return _created(order)

    return app


def guarded_psycopg() -> Flask:
    app = _app()
    onceward = Onceward(
        PsycopgSyncStore(_url(), max_connections=CONNECTIONS), tenants=SINGLE_TENANT
    )
    guard = FlaskGuard(onceward, app)

    @app.post("/orders")
    @guard("orders.create")
    def create() -> Any:
        order = _order()
        values = {"id": order.id, "item": order.item, "quantity": order.quantity}
        onceward.transaction.execute(INSERT, values)
        return _created(order)

    return app
