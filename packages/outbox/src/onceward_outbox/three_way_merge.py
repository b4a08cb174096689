"""Three-way merge of JSON objects: what one side has changed is taken, what both have is not. Pure.

Objects are merged member by member. Arrays are merged by element if their elements are objects with
an identity, a member whose values are unique in the array; otherwise an array is one value.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class _Absent:
    """The value of a member that an object does not have."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
_Members = Mapping[Any, Any]


class Merged(NamedTuple):
    """The merged value, with the local side where both have changed the same."""

    value: Any
    # JSON Pointers (RFC 6901) of what both sides have changed differently; "" is the whole value.
    conflicts: tuple[str, ...]


def three_way_merge(
    base: Any, mine: Any, theirs: Any, *, identities: Mapping[str, str] | None = None
) -> Merged:
    """Merge two values that were made from ``base``.

    ``identities`` says by which member the elements of an array are known: it maps the JSON Pointer
    of the array, without indexes (``/lines``, ``/orders/lines``), to the name of the member.
    """
    merge = _Merge(identities or {})
    value = merge.values(base, mine, theirs)
    return Merged(value, tuple(merge.conflicts))


def merge_patch(
    base: Mapping[str, Any] | None,
    patch: Mapping[str, Any],
    theirs: Mapping[str, Any],
    *,
    identities: Mapping[str, str] | None = None,
) -> Merged:
    """Merge a patch, whose members replace those of the entity, with the server's entity.

    The value is the patch to send: the same members, merged. Without a base every member that
    differs from the server's is a conflict.
    """
    merge = _Merge(identities or {})
    merged = {}
    for name, value in patch.items():
        before = ABSENT if base is None else base.get(name, ABSENT)
        pointer = f"/{_escaped(name)}"
        is_nested = isinstance(value, dict) and isinstance(before, dict)
        mine = before | value if is_nested else value
        now = theirs.get(name, ABSENT)
        if base is None and not _same(mine, now):
            merge.conflicts.append(pointer)
            merged[name] = mine
            continue
        made = merge.values(before, mine, now, pointer, pointer)
        if made is not ABSENT:  # the server has removed what the patch does not change
            merged[name] = made
    return Merged(merged, tuple(merge.conflicts))


class _Merge:
    """One merge. ``shape`` is a pointer without the places in arrays."""

    def __init__(self, identities: Mapping[str, str]) -> None:
        self._identities = identities
        self.conflicts: list[str] = []

    def values(self, base: Any, mine: Any, theirs: Any, pointer: str = "", shape: str = "") -> Any:
        if _same(mine, theirs) or _same(theirs, base):
            return mine
        if _same(mine, base):
            return theirs
        if isinstance(mine, dict) and isinstance(theirs, dict):
            before = base if isinstance(base, dict) else {}
            return self._members((before, mine, theirs), pointer, shape)
        identity = self._identities.get(shape)
        if identity is not None:
            known, ours, others = (_by_identity(side, identity) for side in (base, mine, theirs))
            if ours is not None and others is not None:
                sides = (known or {}, ours, others)
                return list(self._members(sides, pointer, shape, in_array=True).values())
        self.conflicts.append(pointer)
        return mine

    def _members(
        self,
        sides: tuple[_Members, _Members, _Members],
        pointer: str,
        shape: str,
        *,
        in_array: bool = False,
    ) -> dict[Any, Any]:
        base, mine, theirs = sides
        merged = {}
        # In the order of the server, then what only the device has.
        for name in dict.fromkeys((*theirs, *mine, *base)):
            part = f"/{_escaped(str(name))}"
            base_value, mine_value, their_value = (side.get(name, ABSENT) for side in sides)
            value = self.values(
                base_value,
                mine_value,
                their_value,
                pointer + part,
                shape if in_array else shape + part,
            )
            if value is not ABSENT:
                merged[name] = value
        return merged


def _by_identity(side: Any, identity: str) -> dict[Any, Any] | None:
    """Return the elements of an array by identity; None if one has none, or two have the same."""
    if not isinstance(side, list):
        return None
    found: dict[Any, Any] = {}
    for element in side:
        key = element.get(identity) if isinstance(element, dict) else None
        if not isinstance(key, str | int) or isinstance(key, bool) or key in found:
            return None
        found[key] = element
    return found


def _same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: ``1`` and ``1.0`` are, ``1`` and ``true`` not."""
    if one is ABSENT or other is ABSENT:
        return one is other
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
