"""Write a bill of materials (CycloneDX 1.6, JSON) for each wheel in a directory.

It lists what the wheel needs, directly and through others, in the versions and with the hashes of
the lock file, and what needs what. Needed only by an extra: scope ``optional``. The same wheel and
the same lock file give the same bytes.
"""

import json
import sys
from collections.abc import Iterator
from email import message_from_bytes
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5
from zipfile import ZipFile

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock_files import ROOT, Locked, read_lock

__all__ = ["bill_of", "main"]

_OWN: Final = "onceward"
_Node = tuple[str, frozenset[str]]


def bill_of(wheel: Path, locked: list[Locked]) -> str:
    """Return the bill of materials of a wheel. Raises ``LookupError`` for what is not locked."""
    metadata = _metadata(wheel)
    digest = sha256(wheel.read_bytes()).hexdigest()
    root = _component(metadata["Name"], metadata["Version"], (digest,), ComponentType.APPLICATION)
    texts = metadata.get_all("Requires-Dist") or []
    needed, edges = _closure(canonicalize_name(metadata["Name"]), texts)
    versions = {one.name: one for one in locked}
    components: dict[str, Component] = {root.name: root}
    for name, is_required in sorted(needed.items()):
        if name.startswith(_OWN):  # our other packages have bills of their own
            component = _component(name, metadata["Version"], (), ComponentType.LIBRARY)
        elif name in versions:
            found = versions[name]
            component = _component(name, found.version, found.sha256, ComponentType.LIBRARY)
        else:
            raise LookupError(f"{wheel.name} needs {name}, which is not in the lock file")
        component.scope = ComponentScope.REQUIRED if is_required else ComponentScope.OPTIONAL
        components[name] = component
    bom = Bom(components=[one for one in components.values() if one is not root])
    bom.metadata.component = root
    bom.serial_number = uuid5(NAMESPACE_URL, f"{wheel.name} {digest}")
    for name, targets in edges.items():
        bom.register_dependency(components[name], [components[target] for target in targets])
    value: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    value["metadata"].pop("timestamp", None)
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _closure(root: str, texts: list[str]) -> tuple[dict[str, bool], dict[str, list[str]]]:
    """Return what is needed, True if without an extra of the root, and who needs it."""
    needed: dict[str, bool] = {}
    edges: dict[str, set[str]] = {root: set()}
    own_extras = frozenset(
        extra for text in texts for extra in _extras_in_marker(Requirement(text))
    )
    for is_required in (True, False):
        seen: set[_Node] = set()
        waiting: list[tuple[str, list[str], frozenset[str]]] = [
            (root, texts, frozenset() if is_required else own_extras)
        ]
        while waiting:
            name, lines, extras = waiting.pop()
            for requirement in _applying(lines, extras):
                target = canonicalize_name(requirement.name)
                if target == root:  # an extra that names others
                    continue
                edges.setdefault(name, set()).add(target)
                edges.setdefault(target, set())
                needed.setdefault(target, is_required)
                node = (target, frozenset(requirement.extras))
                if node not in seen:
                    seen.add(node)
                    waiting.append((target, _requires(target), node[1]))
    return needed, {name: sorted(targets) for name, targets in edges.items()}


def _applying(lines: list[str], extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield requirements whose marker is true here, without an extra or with one of these."""
    for line in lines:
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in ("", *sorted(extras))]
        marker = requirement.marker
        if marker is None or any(marker.evaluate(each) for each in environments):
            yield requirement


def _extras_in_marker(requirement: Requirement) -> list[str]:
    words = str(requirement.marker or "").replace('"', "'").split("extra == '")
    return [word.partition("'")[0] for word in words[1:]]


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # of another platform
        return []


def _component(
    name: str, version: str, hashes: tuple[str, ...], component_type: ComponentType
) -> Component:
    return Component(
        name=name,
        version=version,
        type=component_type,
        bom_ref=f"{name}@{version}",
        purl=PackageURL("pypi", None, canonicalize_name(name), version),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes],
    )


def _metadata(wheel: Path) -> Any:
    with ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def main(directory: Path) -> int:
    """Write ``NAME-VERSION.cdx.json`` next to each wheel in a directory."""
    locked = read_lock(ROOT / "requirements" / "all.txt")
    for wheel in sorted(directory.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        path = directory / f"{name}-{version}.cdx.json"
        path.write_text(bill_of(wheel, locked), encoding="utf-8")
        print(f"{path} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
