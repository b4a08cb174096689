"""A Flask shop. Run: ``python -m examples.flask_shop``.

    curl -X POST 'localhost:8000/orders?item=boots' -H X-Token:token-1 -H Idempotency-Key:order-1

Send it twice: the second response is a copy of the first, with ``Idempotency-Replayed: true``.
"""

from flask import Flask, abort, request

from onceward import Onceward, Principal
from onceward.flask import FlaskGuard

CUSTOMERS = {"token-1": "ada", "token-2": "bob"}


def customer() -> Principal:
    """Sign in. With Flask-Login, its user is the caller, and this is not needed."""
    name = CUSTOMERS.get(request.headers.get("X-Token", "")) or abort(401)
    return Principal(tenant=name, actor=name)


app = Flask(__name__)
guard = FlaskGuard(Onceward("sqlite:///flask_shop.db"), app, principal=customer)


@app.post("/orders")
@guard("orders.place")
def place_order() -> tuple[dict[str, str], int]:
    """Write the order in the guard's transaction, which also writes the record of the key."""
    item = request.args["item"]
    tx = guard.transaction
    tx.execute("CREATE TABLE IF NOT EXISTS orders (item TEXT)")
    tx.execute("INSERT INTO orders (item) VALUES (:item)", {"item": item})
    return {"item": item}, 201


if __name__ == "__main__":
    app.run(port=8000, threaded=True)
