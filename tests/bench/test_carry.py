"""bench/carry.py, with small wheels that are made here: parts, joining, and a fresh environment."""

import base64
import hashlib
import json
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PART_MB = 0.1


@pytest.fixture(scope="module")
def carry() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        import carry

        yield carry


def wheel(
    folder: Path, name: str, size: int, needs: tuple[str, ...] = (), version: str = "1.0"
) -> Path:
    """A wheel of one module whose bytes do not compress."""
    about = "".join(f"Requires-Dist: {need}\n" for need in needs)
    info = f"{name}-{version}.dist-info"
    text = base64.b85encode(random.Random(name).randbytes(size)).decode()
    content = {
        f"{name}.py": f"DATA = {text!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{about}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for place, body in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(body.encode()).digest()).rstrip(b"=")
        rows.append(f"{place},sha256={digest.decode()},{len(body)}\n")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as packed:
        for place, body in content.items():
            packed.writestr(place, body)
        packed.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    return file


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three: smaller than a part, larger than two, and one that another needs."""
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, "carried_small", 2_000)
    wheel(folder, "carried_large", 220_000, ("carried_small==1.0",))
    wheel(folder, "carried_other", 50_000)
    return folder


@pytest.fixture
def parts(carry: Any, wheels: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    words = ["split", str(wheels), str(folder), "--part-mb", str(PART_MB), "carried_large==1.0"]
    assert carry.main(words) == 0
    return folder


def test_parts_are_at_most_the_size_and_only_the_last_is_smaller(parts: Path, wheels: Path) -> None:
    sizes = [file.stat().st_size for file in sorted(parts.glob("part-*"))]
    assert len(sizes) > 3 and set(sizes[:-1]) == {100_000} and 0 < sizes[-1] <= 100_000
    assert sum(sizes) == sum(file.stat().st_size for file in wheels.iterdir())
    manifest = json.loads((parts / "manifest.json").read_text())
    assert manifest["requirements"] == ["carried_large==1.0"]
    assert {p.name for p in parts.iterdir()} == {
        "manifest.json", *(part["name"] for part in manifest["parts"]),
    }  # fmt: skip


def test_joined_files_are_equal_to_the_bit(
    carry: Any, parts: Path, wheels: Path, tmp_path: Path
) -> None:
    assert carry.main(["join", str(parts), str(tmp_path / "joined")]) == 0
    for file in wheels.iterdir():
        assert (tmp_path / "joined" / file.name).read_bytes() == file.read_bytes()
    assert len([*(tmp_path / "joined").iterdir()]) == 3


def test_parts_that_are_damaged_or_missing_are_named_together_in_one_line(
    carry: Any, parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = parts / "part-001"
    content = bytearray(one.read_bytes())
    content[5] ^= 1
    one.write_bytes(content)
    (parts / "part-002").unlink()
    with (parts / "part-000").open("ab") as longer:
        longer.write(b"!")
    assert carry.main(["join", str(parts), str(tmp_path / "joined")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "carry: 3 of 4 parts must be sent again: part-000 (100001 bytes instead of 100000),"
        " part-001 (damaged), part-002 (missing)"
    ]
    assert not (tmp_path / "joined").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: None, "manifest.json is missing"),
        (lambda m: "{", "manifest.json is damaged"),
        (lambda m: "[]", "manifest.json is damaged"),
        (lambda m: json.dumps(m | {"files": [{"name": "x"}]}), "manifest.json is damaged"),
        (
            lambda m: json.dumps(m | {"files": [m["files"][0] | {"name": "../x.whl"}]}),
            "not a file's plain name",
        ),
        (
            lambda m: json.dumps(m | {"files": m["files"][::-1]}),
            "is not what was packed",
        ),
    ],
)
def test_a_manifest_that_is_not_of_these_parts_is_an_error(
    carry: Any, parts: Path, tmp_path: Path, change: Any, why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    place = parts / "manifest.json"
    text = change(json.loads(place.read_text()))
    place.unlink()
    if text is not None:
        place.write_text(text)
    assert carry.main(["join", str(parts), str(tmp_path / "joined")]) == 1
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1
    assert not [*(tmp_path / "joined").glob("*")]


def test_a_folder_that_has_something_in_it_takes_no_parts(
    carry: Any, parts: Path, wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert carry.main(["split", str(wheels), str(parts), "x"]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert carry.main(["split", str(tmp_path), str(tmp_path / "new"), "x"]) == 1
    assert "no wheels are in" in capsys.readouterr().err


def test_what_was_joined_installs_into_a_fresh_environment_without_an_index(
    carry: Any, parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))  # not what is asked
    place = tmp_path / "venv"
    words = ["join", str(parts), str(tmp_path / "joined"), "--verify", "--environment", str(place)]
    assert carry.main(words) == 0
    said = capsys.readouterr().out
    assert "carried_large 1.0" in said and "carried_small 1.0" in said and "other" not in said
    code = "import carried_large, carried_small; print(len(carried_large.DATA))"
    ended = subprocess.run(
        [place / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "275000\n"


def test_a_wheel_that_is_not_there_fails_the_check_by_name(
    carry: Any, wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "few", "carried_large", 220_000, ("carried_small==1.0",))
    assert carry.main(["verify", str(tmp_path / "few"), "carried_large"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("carry: pip install failed") and "carried_small==1.0" in said


def test_what_the_machine_has_is_seen_in_the_fresh_environment(
    carry: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "few", "carried_on_top", 100, ("pytest",))
    words = ["verify", str(tmp_path / "few"), "--have", f"pytest=={pytest.__version__}"]
    assert carry.main([*words, "carried_on_top"]) == 0
    assert capsys.readouterr().out == "installs carried_on_top 1.0\n"


def test_only_what_the_machine_lacks_is_fetched(carry: Any) -> None:
    def item(name: str, *needs: str, asked: bool = False) -> dict[str, Any]:
        about = {"name": name, "version": "1.0", "requires_dist": [*needs]}
        return {"metadata": about, "requested": asked}

    report = {
        "install": [
            item("vLLM", "torch==1.0", "msg_spec>=0.1 ; python_version > '3'", asked=True),
            item("torch", "nvidia-thing"),
            item("nvidia-thing"),
            item("msg-spec", "shared"),
            item("shared"),
        ]
    }
    assert carry.missing(report, {"torch": "torch==1.0"}) == [
        "msg-spec==1.0",
        "shared==1.0",
        "vLLM==1.0",
    ]
    assert carry.missing(report, {"vllm": "vllm==1.0"}) == []


def test_what_the_machine_has_is_told_by_name_or_by_its_own_list(
    carry: Any, tmp_path: Path
) -> None:
    there = tmp_path / "freeze.txt"
    there.write_text("# there\nTorch==2.11.0+cu128\n-e /somewhere\nours @ file:///x\nA_b==1\n\n")
    found = carry.had([str(there), "numpy==2.0"])
    assert found == {"torch": "Torch==2.11.0+cu128", "a-b": "A_b==1", "numpy": "numpy==2.0"}
    with pytest.raises(carry.Wrong, match="'numpy>2' is not NAME==VERSION"):
        carry.had(["numpy>2"])


def test_packing_fetches_what_is_lacking_and_cuts_it(
    carry: Any, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder in place of an index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    words = ["pack", str(tmp_path / "parts"), "--have", "carried_small==1.0", "carried_large"]
    assert carry.main(words) == 0
    assert carry.main(["join", str(tmp_path / "parts"), str(tmp_path / "joined")]) == 0
    assert [p.name for p in (tmp_path / "joined").iterdir()] == [
        "carried_large-1.0-py3-none-any.whl"
    ]


def test_a_version_that_cannot_stay_is_carried_in_another_and_torch_never(
    carry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "index", "carried_small", 2_000)
    wheel(tmp_path / "index", "torch", 10)
    wheel(tmp_path / "index", "carried_top", 10, ("carried_small==1.0", "torch==1.0"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    words = ["pack", str(tmp_path / "parts"), "carried_top", "--have"]
    assert carry.main([*words, "carried_small==0.9", "--have", "torch==1.0"]) == 0
    said = capsys.readouterr().out
    assert "carry: another carried-small than carried_small==0.9 is carried" in said
    manifest = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    assert [f["name"].partition("-")[0] for f in manifest["files"]] == [
        "carried_small", "carried_top",
    ]  # fmt: skip
    assert carry.main([*words[:1], str(tmp_path / "more"), *words[2:], "torch==0.9"]) == 1
    # pip names every constraint on torch, those of the machine too.
    assert re.search(r"\(constraint\) torch\S*==0\.9", capsys.readouterr().err)


def test_a_package_of_the_machine_that_stands_in_the_way_of_another_does_not_block(
    carry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip names neither of the two as pinned: what the one asks for, the wheels cannot have."""
    index = tmp_path / "index"
    for version in ("1.0", "2.0"):
        wheel(index, "carried_lib", 10, version=version)
    wheel(index, "carried_old", 10, ("carried_lib<2",))
    wheel(index, "carried_old", 10, version="2.0")
    wheel(index, "carried_top", 10, ("carried_lib>=2", "carried_old", "carried_same"))
    wheel(index, "carried_same", 10)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    freeze = tmp_path / "freeze.txt"
    freeze.write_text("carried_lib==1.0\ncarried_old==1.0\ncarried_same==1.0\n")
    words = ["pack", str(tmp_path / "parts"), "carried_top", "--have", str(freeze)]
    assert carry.main(words) == 0
    said = capsys.readouterr().out
    assert "another carried-lib than carried_lib==1.0 is carried" in said
    assert "another carried-old than carried_old==1.0 is carried" in said
    manifest = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    assert [f["name"].rpartition("-py3")[0] for f in manifest["files"]] == [
        "carried_lib-2.0", "carried_old-2.0", "carried_top-1.0",
    ]  # fmt: skip
    assert manifest["have"] == ["carried_same==1.0"]


def test_what_stands_in_the_way_is_read_from_pips_words(carry: Any) -> None:
    there = {"torch": "torch==1", "nvidia-a": "nvidia-a==1", "b": "b==1", "c": "c==1"}
    pinned = "x 2 depends on b>1; The user requested (constraint) b==1"
    assert carry.in_the_way(pinned, there) == ["b"]
    assert carry.in_the_way("x 2 depends on d>1; c 1 depends on d<1", there) == ["c"]
    assert carry.in_the_way("resolution-too-deep", there) == ["b", "c"]  # all that may be another
    kept = "x 2 depends on torch>1; The user requested (constraint) torch==1"
    assert carry.in_the_way(kept, there) == []


def test_a_platform_takes_the_wheels_of_every_older_one(carry: Any) -> None:
    found = carry.tags("manylinux_2_18_x86_64")
    assert found[:3] == ["manylinux_2_18_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]
    assert found[-1] == "manylinux1_x86_64" and "manylinux_2_19_x86_64" not in found
    assert carry.tags("any") == ["any"]


def test_it_is_a_program() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "bench" / "carry.py", "join", "nowhere", "x"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "carry: nowhere/manifest.json is missing: send it with the parts" in ended.stderr
