"""The development secret: created once and the same for every process."""

import json
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onceward.errors import ConfigurationError
from onceward_services.dev_secrets import development_app_check_key, development_secret


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    home = tmp_path / "deep" / ".onceward"
    secret = development_secret(home)
    assert len(secret) >= 32
    assert development_secret(home) == secret


def test_secret_is_readable_by_the_owner_only(tmp_path: Path) -> None:
    home = tmp_path / ".onceward"
    development_secret(home)
    assert stat.S_IMODE((home / "jwt-secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_concurrent_processes_get_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        secrets = set(threads.map(lambda _: development_secret(tmp_path / "home"), range(64)))
    assert len(secrets) == 1
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["jwt-secret"]


def test_empty_secret_file_is_reported_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "jwt-secret").write_text("\n")
    (tmp_path / "jwt-secret").chmod(0o600)
    with pytest.raises(ConfigurationError, match="is empty: delete it"):
        development_secret(tmp_path)


def test_home_that_is_not_a_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(ConfigurationError, match="set ONCEWARD_HOME"):
        development_secret(tmp_path / "home")


def test_app_check_key_is_one_file_readable_by_the_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(lambda _: development_app_check_key(home), range(16)))
    assert paths == {home / "app-check-key.json"}
    assert [path.name for path in home.iterdir()] == ["app-check-key.json"]
    assert stat.S_IMODE((home / "app-check-key.json").stat().st_mode) == 0o600
    (key,) = json.loads((home / "app-check-key.json").read_text())["keys"]
    assert {"kty", "n", "e", "d", "kid", "alg"} <= set(key)


def test_app_check_key_in_a_home_that_is_not_a_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(ConfigurationError, match="set ONCEWARD_HOME"):
        development_app_check_key(tmp_path / "home")


def _of_another_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(mode=0o700)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def _writable(home: Path, _: pytest.MonkeyPatch) -> None:
    home.mkdir()
    home.chmod(0o770)


def _link(home: Path, _: pytest.MonkeyPatch) -> None:
    (home.parent / "elsewhere").mkdir(mode=0o700)
    home.symlink_to(home.parent / "elsewhere")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (_of_another_user, "belongs to another user"),
        (_writable, "can be written by other users"),
        (_link, "symbolic link"),
    ],
)
@pytest.mark.parametrize("secret_of", [development_secret, development_app_check_key])
def test_home_that_others_control_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    secret_of: Callable[[Path], object],
) -> None:
    home = tmp_path / ".onceward"
    prepare(home, monkeypatch)
    with pytest.raises(ConfigurationError, match=f"{reason}.*ONCEWARD_HOME") as raised:
        secret_of(home)
    assert "\n" not in str(raised.value)
    assert list(home.iterdir()) == []


def test_secret_that_others_can_read_or_have_linked_is_refused(tmp_path: Path) -> None:
    home = tmp_path / ".onceward"
    development_secret(home)
    (home / "jwt-secret").chmod(0o644)
    with pytest.raises(ConfigurationError, match="only you can read"):
        development_secret(home)
    (home / "jwt-secret").rename(tmp_path / "known")
    (home / "jwt-secret").symlink_to(tmp_path / "known")
    with pytest.raises(ConfigurationError, match="only you can read"):
        development_secret(home)
