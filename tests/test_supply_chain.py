"""What is installed: locked with hashes, without known vulnerabilities, and listed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.model.bom import Bom
from packaging.requirements import Requirement

from tools.advisories import check_locked, check_requirements, main, read_advisories
from tools.bill_of_materials import bill_of
from tools.lock_files import LOCKS, ROOT, read_lock


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_locked_package_is_pinned_and_has_hashes(path: Path) -> None:
    assert len(read_lock(path)) >= 1
    text = path.read_text(encoding="utf-8")
    # The index is a choice of the machine; no package comes from anywhere else.
    assert re.findall(r"://|--(?:extra-)?index-url|--find-links|--trusted-host| @ ", text) == []


def test_lock_files_agree_and_cover_every_requirement() -> None:
    of_server, of_all = ({one.name: one for one in read_lock(path)} for path in LOCKS[1:3])
    # Installed beside each other in one environment.
    for name in of_server.keys() & of_all.keys():
        assert of_server[name].version == of_all[name].version, name
    assert {"fastapi", "uvicorn", "hatchling", "editables"} <= of_server.keys()
    assert {"pytest", "asyncpg", "cyclonedx-python-lib"} <= of_all.keys()


def test_line_without_a_hash_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    for line in ("msgspec==0.21.0", "msgspec>=0.21 --hash=sha256:" + "0" * 64):
        lock.write_text(f"# a comment\n{line}\n")
        with pytest.raises(ValueError, match="has no hash, or is not pinned"):
            read_lock(lock)


def test_no_dependency_is_affected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().err


def test_planted_vulnerable_versions_are_found(tmp_path: Path) -> None:
    advisories = read_advisories()
    lock = tmp_path / "lock.txt"
    lock.write_text(f"PyJWT==2.10.0 --hash=sha256:{'0' * 64}\n")
    (line,) = check_locked(read_lock(lock), advisories)
    assert "CVE-2024-53861" in line
    for text, expected in {
        "starlette>=0.40": {"CVE-2025-54121", "CVE-2025-62727"},
        "starlette": {"CVE-2024-47874", "CVE-2025-54121", "CVE-2025-62727"},
        "starlette>=0.49.1": set(),
        "PyJWT[crypto]>=2.9": {"CVE-2024-53861"},  # above the lower bound
        "pyjwt>=2.9,!=2.10.0": set(),
        "django>=5.2.7": {"CVE-2025-64459"},
        "unheard-of>=1": set(),
    }.items():
        lines = check_requirements([Requirement(text)], advisories)
        found = {match for line in lines for match in re.findall(r"CVE-[\d-]+\d", line)}
        assert found == expected, text


def test_wheel_has_a_bill_of_materials(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / "packages" / "services", check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    locked = read_lock(ROOT / "requirements" / "all.txt")
    text = bill_of(wheel, locked)
    assert bill_of(wheel, locked) == text
    bom = json.loads(text)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["name"] == "onceward-services"
    components = {one["name"]: one for one in bom["components"]}
    versions = {one.name: one for one in locked}
    for name in ("fastapi", "starlette", "msgspec", "cryptography"):
        assert components[name]["scope"] == "required"
        assert components[name]["version"] == versions[name].version
        assert components[name]["purl"] == f"pkg:pypi/{name}@{versions[name].version}"
        hashes = {one["content"] for one in components[name]["hashes"]}
        assert hashes == set(versions[name].sha256)
    assert components["asyncpg"]["scope"] == "optional"
    assert "pytest" not in components
    needs = {one["ref"]: one.get("dependsOn", []) for one in bom["dependencies"]}
    fastapi = f"fastapi@{versions['fastapi'].version}"
    assert fastapi in needs["onceward-services@0.2.0"]
    assert f"starlette@{versions['starlette'].version}" in needs[fastapi]
    assert len(Bom.from_json(bom).components) == len(components)  # type: ignore[attr-defined]
