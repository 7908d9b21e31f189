"""docs/guarantees.md: every line has tests, and they are there; what the package never imports."""

import ast
import re
import zipfile
from pathlib import Path

import pytest
from words import package_trees

import rloo_cli

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
PACKAGE = Path(rloo_cli.__file__).parent
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?(?: -k \w+)?`|`make \w+`|`pytest -m \w+`")
# What makes objects, files or commands of bytes -> the only modules that may, and why.
ONLY = {
    "pickle": {
        "utils/message_socket.py",  # between a parent and its own child
        "distributed/world.py",  # between the ranks of a run
        "config/compose.py",  # copies of what Hydra composed, within the process
        "utils/worker_pool.py",  # messages to a worker; its answers are bytes
        "rewards/engine/worker.py",  # a reward's results: the user's own code on both sides
        "rewards/engine/worker_calls.py",
    },
    "zipfile": {"data/synthetic/smollm2.py"},  # a wheel that pip has checked against its hash
}
NEVER = {"tarfile", "marshal", "shelve", "dill", "cloudpickle", "joblib", "py7zr", "rarfile"}
CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "np.load", "numpy.load",
         "pickle.load", "yaml.load", "yaml.unsafe_load", "shutil.unpack_archive",
         "hydra.utils.instantiate", "pandas.read_pickle"}  # fmt: skip


def rows() -> list[list[str]]:
    """The cells of each line of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [
        row for row in cells
        if len(row) == 4 and not set("".join(row)) <= {"-", " "} and row[0] != "threat"
    ]  # fmt: skip


def test_every_line_of_the_page_has_a_test_that_is_there() -> None:
    found = rows()
    assert len(found) > 25
    for row in found:
        named = list(TEST.finditer(row[3]))
        assert named, f"no test: {row}"
        for test in named:
            path, function = test[1], test[2]
            if path is not None:
                assert (ROOT / path).is_file(), path
                text = (ROOT / path).read_text()
                assert function is None or f"def {function}(" in text, (path, function)


def test_what_makes_objects_of_bytes_is_imported_where_it_may_be() -> None:
    for name, tree in package_trees().items():
        imported = {
            alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        imported |= {
            node.module.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
        }
        assert not imported & NEVER, name
        for module, allowed in ONLY.items():
            assert module not in imported or name in allowed, (name, module)


def test_no_code_of_a_text_is_run_and_no_archive_unpacked() -> None:
    for name, tree in package_trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            assert ast.unparse(node.func) not in CALLS, (name, node.lineno)
            for keyword in node.keywords:
                said = f"{keyword.arg}={ast.unparse(keyword.value)}"
                assert said not in ("shell=True", "allow_pickle=True", "weights_only=False"), name


def test_the_one_archive_is_checked_before_and_cannot_write_elsewhere(tmp_path: Path) -> None:
    source = (PACKAGE / "data/synthetic/smollm2.py").read_text()
    assert "--require-hashes" in source and source.count("extractall") == 1
    with zipfile.ZipFile(tmp_path / "evil.whl", "w") as archive:
        for name in ("../outside", "/tmp/../../outside", "a/../../outside", "inside"):
            archive.writestr(name, "x")
    with zipfile.ZipFile(tmp_path / "evil.whl") as archive:
        archive.extractall(tmp_path / "folder" / "deep")
    written = [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".whl"]
    assert written and all(p.is_relative_to(tmp_path / "folder" / "deep") for p in written)


@pytest.mark.parametrize("page", ["index.md"])
def test_the_page_is_linked(page: str) -> None:
    assert "(guarantees.md" in (ROOT / "docs" / page).read_text()
    assert "guarantees.md" in (ROOT / "mkdocs.yml").read_text()
