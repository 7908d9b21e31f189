"""docs/reference.md names every file, environment variable and exit code that there is."""

import re
from pathlib import Path

from rloo_cli.utils import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference.md").read_text()
CODE = {
    path: path.read_text()
    for folder in ("rloo_cli", "scripts", "conf")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sbatch", ".sh", ".yaml")
}
# Files that are read, not written, and one that a server that cannot start leaves for its starter.
# They read such files, or write them in the cache.
ELSEWHERE = ("rules_model.py", "smollm2.py", "tasks.py")
READ = {
    "adapter_config.json",
    "config.json",
    "default.yaml",
    "known_models.json",
    "old_names.txt",
    "optimization_results.yaml",
    "tldr_mini.yaml",
    "trl_fields.txt",
    "error.json",
}


def test_every_environment_variable_stands_on_the_page() -> None:
    found = {
        name
        for path, text in CODE.items()
        if "compat/migrate" not in str(path)  # RLOO_... are its tables of TRL's RLOO
        for name in re.findall(r"\bRLOO_[A-Z_]+\b", text)
    }
    assert not sorted(name for name in found if f"`{name}`" not in PAGE)


def test_every_variable_of_the_page_stands_in_the_code() -> None:
    code = "\n".join(CODE.values())
    assert not [name for name in re.findall(r"`(RLOO_[A-Z_]+)`", PAGE) if name not in code]


def test_every_exit_code_stands_on_the_page() -> None:
    kinds = [errors.RunError, *errors.RunError.__subclasses__()]
    for kind in kinds:
        assert f"\n| {kind.code} | " in PAGE, kind


def test_every_file_that_a_run_writes_stands_on_the_page() -> None:
    pattern = re.compile(r'"([a-z_]+\.(?:json|jsonl|yaml|txt|png))"')
    written = {
        name
        for path, text in CODE.items()
        for name in pattern.findall(text)
        if path.name not in ELSEWHERE and "compat/migrate" not in str(path)
    }
    missing = sorted(name for name in written - READ if name not in PAGE)
    assert not missing
