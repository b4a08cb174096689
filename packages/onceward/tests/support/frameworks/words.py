"""What the three apps have in common."""

CREATE = "CREATE TABLE IF NOT EXISTS orders (item text)"
LIMIT = 20_000
