"""What `rloo migrate` is given may be huge, or grow without end: it answers in seconds."""

import time
from pathlib import Path

import pytest

from rloo_cli.cli.migrate import run
from rloo_cli.compat.migrate.read import MAX_COMMAND_CHARS, MAX_FILE_BYTES
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

COMMAND = "python rloo.py --rloo_k 2 --learning_rate 1e-6"
LONG = MAX_FILE_BYTES // 8
SMALL = {  # each of them is a run that is migrated
    "old.yaml": "rloo_k: 2\nlearning_rate: 1.0e-6",
    "old.json": '{"rloo_k": 2, "learning_rate": 1e-6}',
}


def doubled_yaml(levels: int) -> str:
    """Each level is the one below twice: 2 ** levels values where aliases are written out."""
    lines = [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, levels)]
    return "a0: &a0 {x: 1, y: 2}\n" + "".join(lines)


ENDLESS = {
    "nested.yaml": "[" * LONG,
    "doubled.yaml": doubled_yaml(40),
    "doubled_less.yaml": doubled_yaml(22),  # which fits in memory: seconds, and not an end by force
    "itself.yaml": "a: &a {b: *a}\n",
}


@pytest.mark.parametrize("name", SMALL)
def test_a_huge_file_is_refused_by_its_size(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(SMALL[name] + "\n" * MAX_FILE_BYTES)
    with pytest.raises(ConfigError) as refused:
        run(["--world-size", "1", str(path)])
    (problem,) = refused.value.problems
    assert problem.where == str(path) and "kB" in problem.why and problem.fix


@pytest.mark.parametrize("name", ENDLESS)
def test_what_grows_without_end_is_refused_in_seconds(name: str, tmp_path: Path) -> None:
    path, began = tmp_path / name, time.process_time()
    path.write_text(ENDLESS[name])
    with pytest.raises(ConfigError):
        run(["--world-size", "1", str(path)])
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(COMMAND + " --columns " + "[" * 30_000, id="nested"),
        pytest.param("'\n" * 15_000 + '"', id="quotes"),
        pytest.param("# " * 15_000 + "'", id="hashes"),
        pytest.param(COMMAND + ' "' + "a" * MAX_COMMAND_CHARS + '"', id="word"),
    ],
)
def test_a_command_that_grows_without_end_is_refused_in_seconds(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError):
        run(["--world-size", "1", text])
    assert time.process_time() - began < 5
