"""The nodes of the tree and the quests: ``nodes.toml`` and ``quests.toml``, read once and checked.

A deployment with other content has both files in a directory of its own. Errors in them are
reported at start-up.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from onceward.errors import ConfigurationError

__all__ = ["Catalogue", "Node", "Quest", "bundled_catalogue", "load_catalogue", "parse_catalogue"]

_NODES: Final = "nodes.toml"
_QUESTS: Final = "quests.toml"
_VERSION_CHARS: Final = 16

# Ids appear in paths and in logs.
_Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Text = Annotated[str, Meta(min_length=1, max_length=100)]
# At least 1: a new walker could allocate a node that costs nothing.
_Points = Annotated[int, Meta(ge=1, le=1_000_000)]


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of the tree. A keystone may reveal a hidden quest."""

    id: _Id
    kind: Literal["node", "keystone"]
    title: _Text
    points: _Points
    energy: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    requires: tuple[_Id, ...] = ()
    reveals: _Id | None = None


class Quest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quest: steps to complete in order, and the points awarded at the end."""

    id: _Id
    title: _Text
    steps: Annotated[int, Meta(ge=1, le=1000)]
    points: _Points
    requires: tuple[_Id, ...] = ()
    hidden: bool = False


class Catalogue:
    """Nodes and quests by id, in the order of their files.

    ``version`` is a hash of both files: it differs if and only if the content does.
    """

    def __init__(
        self, nodes: Iterable[Node], quests: Iterable[Quest], *, version: str = ""
    ) -> None:
        self.version = version
        self.nodes: Mapping[str, Node] = {node.id: node for node in nodes}
        self.quests: Mapping[str, Quest] = {quest.id: quest for quest in quests}
        self._revealers: dict[str, tuple[str, ...]] = {}
        for node in self.nodes.values():
            if node.reveals is not None:
                known = self._revealers.get(node.reveals, ())
                self._revealers[node.reveals] = (*known, node.id)

    def revealed_by(self, quest_id: str) -> tuple[str, ...]:
        """Return the keystones that reveal a hidden quest; one of them is enough."""
        return self._revealers.get(quest_id, ())

    def with_dependents(self, node_ids: Iterable[str], among: Iterable[str]) -> set[str]:
        """Return these nodes and those ``among`` the others that require them, also indirectly."""
        found, others = set(node_ids), list(among)
        grew = True
        while grew:
            more = {
                id_
                for id_ in others
                if id_ not in found
                and id_ in self.nodes
                and not found.isdisjoint(self.nodes[id_].requires)
            }
            found |= more
            grew = bool(more)
        return found


@cache
def bundled_catalogue() -> Catalogue:
    """Return the catalogue that comes with the package."""
    here = files("onceward_services.walk")
    return parse_catalogue(here.joinpath(_NODES).read_bytes(), here.joinpath(_QUESTS).read_bytes())


@cache
def load_catalogue(directory: Path | None) -> Catalogue:
    """Return the catalogue of a directory, or the bundled one. Read once by each process.

    Raises ``ConfigurationError`` if a file cannot be read or is not a catalogue.
    """
    if directory is None:
        return bundled_catalogue()
    try:
        nodes = (directory / _NODES).read_bytes()
        quests = (directory / _QUESTS).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"ONCEWARD_WALK_CATALOGUE_DIR: cannot read {error.filename}: {error.strerror}"
        ) from error
    try:
        return parse_catalogue(nodes, quests)
    except ConfigurationError as error:
        raise ConfigurationError(f"ONCEWARD_WALK_CATALOGUE_DIR={directory}: {error}") from error


def parse_catalogue(nodes_toml: bytes, quests_toml: bytes) -> Catalogue:
    """Parse both files; raises ``ConfigurationError`` with the file and the first error."""
    nodes = _entries(nodes_toml, _NODES, "node", Node)
    quests = _entries(quests_toml, _QUESTS, "quest", Quest)
    _check_ids([node.id for node in nodes], _NODES)
    _check_ids([quest.id for quest in quests], _QUESTS)
    _check_requires({node.id: node.requires for node in nodes}, _NODES, "node")
    _check_requires({quest.id: quest.requires for quest in quests}, _QUESTS, "quest")
    version = sha256(b"%d\n%b%b" % (len(nodes_toml), nodes_toml, quests_toml)).hexdigest()
    catalogue = Catalogue(nodes, quests, version=version[:_VERSION_CHARS])
    _check_reveals(catalogue)
    return catalogue


_Entry = TypeVar("_Entry")


def _entries(data: bytes, source: str, name: str, type_: type[_Entry]) -> list[_Entry]:
    try:
        table: dict[str, Any] = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: {error}") from error
    if set(table) != {name}:
        raise ConfigurationError(f"{source}: expected only [[{name}]] tables")
    entries = table[name]
    if not isinstance(entries, list):
        raise ConfigurationError(f"{source}: write [[{name}]] with two brackets")
    found = []
    for number, entry in enumerate(entries, 1):
        try:
            found.append(msgspec.convert(entry, type_))
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{source}: {name} {number}: {error}") from error
    return found


def _check_ids(ids: list[str], source: str) -> None:
    for id_, times in Counter(ids).items():
        if times > 1:
            raise ConfigurationError(f"{source}: the id {id_!r} occurs {times} times")


def _check_requires(requires: Mapping[str, tuple[str, ...]], source: str, name: str) -> None:
    for id_, needed in requires.items():
        for other in needed:
            if other not in requires:
                raise ConfigurationError(
                    f"{source}: {id_!r} requires {other!r}, and there is no such {name}"
                )
    try:
        TopologicalSorter(requires).prepare()
    except CycleError as error:
        cycle = " → ".join(reversed(error.args[1]))
        raise ConfigurationError(f"{source}: these require each other: {cycle}") from error


def _check_reveals(catalogue: Catalogue) -> None:
    for node in catalogue.nodes.values():
        if node.reveals is None:
            continue
        if node.kind != "keystone":
            raise ConfigurationError(
                f"nodes.toml: {node.id!r} reveals a quest, which only a keystone may"
            )
        quest = catalogue.quests.get(node.reveals)
        if quest is None:
            raise ConfigurationError(
                f"nodes.toml: {node.id!r} reveals {node.reveals!r}, and there is no such quest"
            )
        if not quest.hidden:
            raise ConfigurationError(
                f"nodes.toml: {node.id!r} reveals {quest.id!r}, which is not hidden"
            )
    for quest in catalogue.quests.values():
        if quest.hidden and not catalogue.revealed_by(quest.id):
            raise ConfigurationError(
                f"quests.toml: {quest.id!r} is hidden and no keystone reveals it"
            )
