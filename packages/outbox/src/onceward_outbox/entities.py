"""The entity that an entry is about, by any of its ids and the path of the request."""

import re
from typing import Final

from onceward_outbox.transaction import Transaction

__all__ = ["find_entity"]

# Path segments with a digit look like ids; the version of an API does not.
_HAS_DIGIT: Final = re.compile(r"^(?!v[0-9]+$).*[0-9]")


def find_entity(
    tx: Transaction,
    *,
    user_id: str,
    entity_type: str,
    endpoint: str,
    local_id: str | None,
    server_id: str | int | None,
) -> tuple[str, str]:
    """Return the name of the entity, and of what the path names: the entity or a part of it.

    Both are the same for all entries about one entity, whichever of its ids they use. An entry
    about a part of the entity, such as ``/notes/5/pin``, names another thing, with its own version.
    """
    path = endpoint.partition("?")[0]
    text = _entity_in(path) if server_id is None else str(server_id)
    named = local_id
    if named is None:
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None  # noqa: PLR2004
        found = tx.rows("local_of_server_id", user_id=user_id, text=text, number=number)
        named = found[0][0] if found else text
    entity = f"{entity_type}/{named}"
    return entity, entity + _part_in(path, str(named), text)


def _part_in(path: str, *names: str) -> str:
    """Return what follows the entity in a path: ``/pin`` in ``/notes/5/pin``, often nothing."""
    parts = path.rstrip("/").split("/")
    for place in range(len(parts) - 1, -1, -1):
        if parts[place].removeprefix("{local:").removesuffix("}") in names:
            return "".join(f"/{part}" for part in parts[place + 1 :])
    return ""


def _entity_in(path: str) -> str:
    """Return what names the entity in a path: ``5`` in ``/notes/5`` and in ``/notes/5/pin``."""
    parts = path.split("/")
    named = (part for part in reversed(parts) if _HAS_DIGIT.search(part))
    return next(named, parts[-1])
