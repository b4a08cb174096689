"""A shop with its own SQLAlchemy engine. Run: ``uvicorn examples.sqlalchemy_shop:app``."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException
from sqlalchemy import event
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Onceward
from onceward.fastapi import Session, principal_from
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore


class Base(DeclarativeBase):
    """Base class of the app's tables."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


engine = create_async_engine("sqlite+aiosqlite:///sqlalchemy_shop.db")
sessions = async_sessionmaker(engine, expire_on_commit=False)


@event.listens_for(engine.sync_engine, "connect")
def _set_up(connection: object, _record: object) -> None:
    """WAL lets readers run beside the writer; FULL loses no commit in a power failure."""
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


@asynccontextmanager
async def _lifespan(_app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


CUSTOMERS = {"token-1": "ada", "token-2": "bob"}


async def customer(x_token: Annotated[str, Header()]) -> str:
    """Sign in: your own dependency goes here."""
    if x_token not in CUSTOMERS:
        raise HTTPException(401, "unknown token")
    return CUSTOMERS[x_token]


app = FastAPI(lifespan=_lifespan)
onceward = Onceward(SqlAlchemyStore(sessions), principal=principal_from(customer))
onceward.install(app)


@app.post("/orders", status_code=201)
@onceward.guard("orders.create")
async def create(item: str, session: Session) -> dict[str, int | str]:
    """Write the order. Flush for the id; Onceward commits the transaction."""
    order = Order(item=item)
    session.add(order)
    await session.flush()
    return {"id": order.id, "item": order.item}
