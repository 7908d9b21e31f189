"""What a shell or a launcher leaves around `rloo`: one error that names it, never a traceback."""

import resource
import subprocess

import pytest
from cli_cases import PYTHON, Rloo


@pytest.mark.parametrize(
    ("variables", "unset"),
    [
        ({"WORLD_SIZE": "0"}, "unset WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "unset WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "0", "RANK": "0", "WORLD_SIZE": "1"}, "unset LOCAL_WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "unset RANK WORLD_SIZE"),
    ],
)
def test_a_launchers_variables_that_make_no_sense_are_named(
    variables: dict[str, str], unset: str, rloo: Rloo
) -> None:
    ended = rloo("train", "+recipe=smoke", **variables)
    assert ended.code == 2 and f"fix      {unset}\n" in ended.err, ended.said
    assert not (rloo.folder / "runs").exists()


def test_a_rank_without_a_number_of_ranks_is_not_used_and_that_is_said(rloo: Rloo) -> None:
    ended = rloo("train", "+recipe=smoke", "max_steps=1", RANK="1")
    assert ended.code == 0 and "unset RANK" in ended.out


def test_pythoninspect_is_refused_before_anything_waits_for_input(rloo: Rloo) -> None:
    ended = rloo.real("train", "+recipe=smoke", PYTHONINSPECT="1")
    assert ended.code == 3 and "unset PYTHONINSPECT" in ended.err
    assert "Traceback" not in ended.said


def run_with_limit(rloo: Rloo, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    """`rloo recipes` where so many files may be open."""
    return subprocess.run(
        [*PYTHON, "recipes"],
        cwd=rloo.folder,
        env=rloo.environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


def test_too_few_open_files_are_named_with_the_number_that_is_needed(rloo: Rloo) -> None:
    ended = run_with_limit(rloo, 64, 64)
    assert ended.returncode == 3 and "ulimit -n 256" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_soft_limit_is_raised_where_the_hard_one_allows_it(rloo: Rloo) -> None:
    assert run_with_limit(rloo, 64, 1024).returncode == 0
