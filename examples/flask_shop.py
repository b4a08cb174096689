"""A Flask shop. Run: ``python -m examples.flask_shop``.

    curl -X POST 'localhost:8000/orders?item=boots' -H 'Idempotency-Key: my-first-order'

Send it twice: the second response is a copy of the first, with ``Idempotency-Replayed: true``.
"""

from flask import Flask, request

from holdfast import SINGLE_TENANT, Holdfast
from holdfast.flask import FlaskGuard

app = Flask(__name__)
guard = FlaskGuard(Holdfast("sqlite:///flask_shop.db", tenants=SINGLE_TENANT), app)


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
