"""The versions that rloo is tested with: `make test-lowest`, `test-newest` and `test-beyond`.

    python tests/house/tested_versions.py lowest   # the lowest version of each package, for pip
    python tests/house/tested_versions.py newest   # what pyproject.toml permits, for pip
    python tests/house/tested_versions.py beyond   # without the upper bounds of torch, transformers
    python tests/house/tested_versions.py record lowest|usual|newest   # what is installed here
    python tests/house/tested_versions.py          # fills in the table of docs/reference.md

The first three print requirements: of a run, of the extras that tests use, and of the tests' own
tools, which are the newest in each. `record` writes tested_versions.json, after a suite has passed.
"""

import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
RECORD_FILE = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "reference.md"
START = "<!-- `python tests/house/tested_versions.py` fills in this table -->"
END = "<!-- the end of the table -->"
COLUMNS = {"lowest": "lowest", "usual": "beside vLLM", "newest": "highest"}
BOUNDED = ("torch", "transformers")  # whose upper bound in pyproject.toml is what was tested


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def needs_and_tools(about: dict[str, Any]) -> tuple[list[Requirement], list[Requirement]]:
    """What users install, with the extras that tests use; and the tests' own tools."""
    extras = about["optional-dependencies"]
    needs = [Requirement(text) for text in about["dependencies"]]
    tools = []
    for requirement in map(Requirement, extras["test"]):
        if requirement.name == about["name"]:
            needs += [Requirement(t) for extra in sorted(requirement.extras) for t in extras[extra]]
        else:
            tools.append(requirement)
    return needs, tools


def lowest_version(requirement: Requirement) -> str:
    """The version that a requirement begins with."""
    (found,) = (part.version for part in requirement.specifier if part.operator in (">=", "=="))
    return found


def requirement_lines(kind: str, about: dict[str, Any]) -> list[str]:
    """The lines for pip of an environment: lowest, newest or beyond."""
    needs, tools = needs_and_tools(about)
    names = {canonicalize_name(requirement.name) for requirement in needs}
    lines = [str(tool) for tool in tools if canonicalize_name(tool.name) not in names]
    for requirement in needs:
        bounds = str(requirement.specifier)
        if kind == "lowest":
            bounds = f"=={lowest_version(requirement)}"
        elif kind == "beyond" and requirement.name in BOUNDED:
            bounds = f">={lowest_version(requirement)}"
        lines.append(requirement.name + bounds)
    return lines


def record_installed(column: str) -> None:
    """Write the versions that are installed here into a column of the record."""
    needs, _ = needs_and_tools(project())
    record = json.loads(RECORD_FILE.read_text()) if RECORD_FILE.exists() else {}
    record[column] = {need.name: metadata.version(need.name) for need in needs}
    RECORD_FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def table_text() -> str:
    """The table of the page, from the record and pyproject.toml."""
    from rloo_cli.generation.vllm import required_parts  # not needed to make an environment

    needs, _ = needs_and_tools(project())
    record = json.loads(RECORD_FILE.read_text())
    rows = ["| package | pyproject.toml | " + " | ".join(COLUMNS.values()) + " |"]
    rows.append("|---" * (2 + len(COLUMNS)) + "|")
    for need in needs:
        found = [record[column][need.name] for column in COLUMNS]
        rows.append(f"| `{need.name}` | `{need.specifier}` | {' | '.join(found)} |")
    vllm = required_parts.tried_versions()
    return "\n".join([*rows, "", f"Of vLLM's versions, {vllm}."])


def filled_page(page: str) -> str:
    """The page with the table as it has to be now."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table_text()}\n\n{END}{after}"


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            PAGE.write_text(filled_page(PAGE.read_text()))
        case ["record", column]:
            record_installed(column)
        case [kind]:
            print("\n".join(requirement_lines(kind, project())))
