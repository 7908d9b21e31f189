"""A user id without a passwd entry and without HOME, as containers have: the cache is elsewhere."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import Rloo

from rloo_cli.utils import paths

# As where no passwd entry has this user id: reached through PYTHONPATH by every process.
NO_ENTRY = """
import pwd

def missing(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = missing
"""


@pytest.fixture
def homeless(rloo: Rloo, tmp_path_factory: pytest.TempPathFactory) -> Rloo:
    """`rloo` of a user who has no home."""
    site = tmp_path_factory.mktemp("no_entry")
    (site / "sitecustomize.py").write_text(NO_ENTRY)
    names = ("HOME", "XDG_CACHE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "RLOO_CACHE")
    kept = {k: v for k, v in rloo.environment.items() if k not in names}
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = {"PYTHONPATH": path, "TMPDIR": str(tmp_path_factory.mktemp("temporary"))}
    return replace(rloo, environment=kept | made)


def test_a_run_trains_with_its_cache_in_the_temporary_folder_and_says_so(homeless: Rloo) -> None:
    ended = homeless.real("train", "+recipe=smoke", "max_steps=1")
    assert ended.code == 0, ended.said
    cache = Path(homeless.environment["TMPDIR"], f"rloo-cache-{os.getuid()}")
    assert ended.err.count(str(cache)) == 1 and (cache / "rloo").is_dir()
    assert cache.stat().st_mode & 0o77 == 0
    assert not (homeless.folder / "~").exists()


def test_a_run_that_names_its_caches_gets_no_warning(homeless: Rloo, tmp_path: Path) -> None:
    caches = {"RLOO_CACHE": str(tmp_path / "ours"), "HF_HOME": str(tmp_path / "theirs")}
    ended = homeless.real("train", "+recipe=smoke", "--dry-run", **caches)
    assert ended.code == 0 and "warning" not in ended.err, ended.said


def test_a_path_of_the_home_folder_is_refused_where_there_is_none(homeless: Rloo) -> None:
    ended = homeless.real("train", "+recipe=smoke", "root=~/runs", "--dry-run")
    assert ended.code == 2 and "root" in ended.err, ended.said


def test_a_cache_that_another_user_has_put_there_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "RLOO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"rloo-cache-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("LOGNAME", "kept")
    assert paths.stand_in_for_home()
    chosen = Path(os.environ["XDG_CACHE_HOME"])
    assert chosen.parent == tmp_path and not chosen.is_symlink()
    monkeypatch.delenv("XDG_CACHE_HOME")
