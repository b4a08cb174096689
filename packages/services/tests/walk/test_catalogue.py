"""The bundled catalogue is consistent, and errors in a catalogue are reported."""

import pytest

from onceward.errors import ConfigurationError
from onceward_services.walk.catalogue import bundled_catalogue, parse_catalogue

NODE = '[[node]]\nid = "a"\nkind = "node"\ntitle = "A"\npoints = 1\n'
KEYSTONE = '[[node]]\nid = "k"\nkind = "keystone"\ntitle = "K"\npoints = 1\nreveals = "h"\n'
QUEST = '[[quest]]\nid = "q"\ntitle = "Q"\nsteps = 1\npoints = 1\n'
HIDDEN = '[[quest]]\nid = "h"\ntitle = "H"\nsteps = 1\npoints = 1\nhidden = true\n'


def node(id_: str, *requires: str) -> str:
    return NODE.replace('"a"', f'"{id_}"') + f"requires = {list(requires)}\n"


def quest(id_: str, *requires: str) -> str:
    return QUEST.replace('"q"', f'"{id_}"') + f"requires = {list(requires)}\n"


def test_points_of_all_quests_pay_for_the_whole_tree() -> None:
    catalogue = bundled_catalogue()
    cost = sum(node.points for node in catalogue.nodes.values())
    award = sum(quest.points for quest in catalogue.quests.values())
    assert cost <= award


def test_one_bundled_keystone_reveals_the_one_hidden_quest() -> None:
    catalogue = bundled_catalogue()
    hidden = [quest.id for quest in catalogue.quests.values() if quest.hidden]
    assert hidden == ["quest.hidden-spring"]
    assert catalogue.revealed_by(hidden[0]) == ("keystone.dowser",)


def test_there_is_a_keystone_that_reveals_nothing() -> None:
    keystones = [n for n in bundled_catalogue().nodes.values() if n.kind == "keystone"]
    assert {n.reveals is None for n in keystones} == {True, False}


def test_a_small_catalogue_is_read_in_the_order_of_its_files() -> None:
    catalogue = parse_catalogue((node("b") + node("a", "b") + KEYSTONE).encode(), HIDDEN.encode())
    assert list(catalogue.nodes) == ["b", "a", "k"]
    assert catalogue.nodes["a"].requires == ("b",)
    assert catalogue.quests["h"].hidden


def test_indirect_dependents_are_found() -> None:
    text = node("a") + node("b", "a") + node("c", "b") + node("d") + node("e", "d", "c")
    catalogue = parse_catalogue(text.encode(), QUEST.encode())
    held = ["a", "b", "c", "d", "e", "gone-from-the-file"]
    assert catalogue.with_dependents(["b"], held) == {"b", "c", "e"}
    assert catalogue.with_dependents(["b"], ["a", "b", "e"]) == {"b"}
    assert catalogue.with_dependents([], held) == set()


@pytest.mark.parametrize(
    ("nodes", "quests", "message"),
    [
        (node("a", "b"), QUEST, "nodes.toml: 'a' requires 'b', and there is no such node"),
        (NODE, quest("q", "r"), "quests.toml: 'q' requires 'r', and there is no such quest"),
        (NODE, quest("q", "a"), "quests.toml: 'q' requires 'a', and there is no such quest"),
        (node("a", "a"), QUEST, "nodes.toml: these require each other: a → a"),
        (NODE, quest("q", "r") + quest("r", "q"), "quests.toml: these require each other: "),
        (NODE + NODE, QUEST, "nodes.toml: the id 'a' occurs 2 times"),
        (NODE, QUEST * 3, "quests.toml: the id 'q' occurs 3 times"),
        (NODE, HIDDEN, "quests.toml: 'h' is hidden and no keystone reveals it"),
        (KEYSTONE, QUEST, "nodes.toml: 'k' reveals 'h', and there is no such quest"),
        (
            KEYSTONE,
            HIDDEN.replace("true", "false"),
            "nodes.toml: 'k' reveals 'h', which is not hidden",
        ),
        (
            KEYSTONE.replace('"keystone"', '"node"'),
            HIDDEN,
            "nodes.toml: 'k' reveals a quest, which only a keystone may",
        ),
        (NODE + "color = 1\n", QUEST, "nodes.toml: node 1: Object contains unknown field `color`"),
        (NODE.replace("points = 1", ""), QUEST, "nodes.toml: node 1: Object missing required"),
        (
            NODE.replace("points = 1", "points = 0"),
            QUEST,
            "nodes.toml: node 1: Expected `int` >= 1",
        ),
        (NODE.replace('"node"', '"gem"'), QUEST, "nodes.toml: node 1: Invalid enum value 'gem'"),
        (NODE.replace('"a"', '"a/b"'), QUEST, "nodes.toml: node 1: Expected `str` matching"),
        (
            NODE,
            QUEST.replace("steps = 1", "steps = 0"),
            "quests.toml: quest 1: Expected `int` >= 1",
        ),
        (NODE, QUEST.replace("1", '"1"', 1), "quests.toml: quest 1: Expected `int`, got `str`"),
        (NODE, NODE, "quests.toml: expected only [[quest]] tables"),
        ("", QUEST, "nodes.toml: expected only [[node]] tables"),
        ('[node]\nid = "a"\n', QUEST, "nodes.toml: write [[node]] with two brackets"),
        ("[[node", QUEST, "nodes.toml: "),
    ],
)
def test_catalogue_error_names_the_file_in_one_line(nodes: str, quests: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_catalogue(nodes.encode(), quests.encode())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_reported() -> None:
    with pytest.raises(ConfigurationError, match=r"nodes\.toml: "):
        parse_catalogue(b"\xff", QUEST.encode())
