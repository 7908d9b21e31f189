"""Every command, script and reward function of the pages that RLOO's users come from."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from migrate_cases import checked

from rloo_cli.cli.migrate import run
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

HERE = Path(__file__).parent
PAGES = yaml.safe_load((HERE / "published_pages.yaml").read_text())
ROWS = [(page["page"], row) for page in PAGES for row in page["rows"]]
CONVERTED = [row for _, row in ROWS if "run" in row]


@pytest.mark.parametrize("row", CONVERTED, ids=lambda row: row["is"])
def test_a_printed_command_is_converted_or_answered(row, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in row.get("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    words = [row["run"]] if row["run"] in row.get("files", {}) else shlex.split(row["run"])
    if "refused" in row:
        with pytest.raises(ConfigError, match=row["refused"]):
            run(words)
        return
    assert run(words) == 0
    said = capsys.readouterr().out
    if "command" in row:
        assert said.splitlines()[0] == row["command"]
        return
    plain = " ".join(said.replace("#", "").split())
    for part in row.get("says", ()):
        assert part in plain
    found = checked(said, tmp_path)[0]
    for key, value in row["want"].items():
        assert value_of(found, key) == value, f"{key} is {value_of(found, key)}"


def value_of(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("row", [r for _, r in ROWS if "python" in r], ids=lambda row: row["is"])
def test_a_worked_example_comes_to_the_same_numbers(row):
    exec(compile(row["python"], row["is"], "exec"), {"__name__": "page"})


def test_every_printed_script_and_reward_is_run_by_a_test():
    scripts = {s["is"] for s in yaml.safe_load((HERE / "trl_scripts.yaml").read_text())}
    rewards = (HERE.parent / "rewards" / "test_seed_rewards.py").read_text()
    for _, row in ROWS:
        assert row.get("script", next(iter(scripts))) in scripts
        for name in row.get("reward", ()):
            assert f"def {name}(" in rewards
        assert {"run", "script", "reward", "python"} & row.keys() or "scale.md" in row["becomes"]


def table() -> str:
    """The table of docs/migrate.md."""
    lines = ["| page | what it prints | here |", "|---|---|---|"]
    for page in PAGES:
        for index, row in enumerate(page["rows"]):
            head = page["page"] if index == 0 else ""
            lines.append(f"| {head} | {row['is']} | {row['becomes']} |")
    return "\n".join(lines)


def test_the_page_on_migrating_has_the_table_of_them():
    page = (HERE.parents[1] / "docs" / "migrate.md").read_text()
    assert table() in page


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
