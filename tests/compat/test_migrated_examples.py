"""The commands of TRL's page on GRPO, of an agent and of images, become recipes that train."""

from pathlib import Path

import pytest
import vision_cases as v
import yaml
from cli_cases import strict
from fork_cases import Forked

from rloo_cli.cli import plan
from rloo_cli.cli.migrate import run
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError

PAGES = yaml.safe_load((Path(__file__).parent / "published_pages.yaml").read_text())
ROWS = {row["is"]: row for page in PAGES for row in page["rows"]}
AGENT = next(row for name, row in ROWS.items() if "grpo_agent.py" in name)
IMAGES = next(row for name, row in ROWS.items() if "grpo_vlm.py" in name)
SCRIPT = "examples/scripts/grpo_agent.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def migrate(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(command.split()) == 0
    text = capsys.readouterr().out
    Path("my.yaml").write_text(text)
    return text


def test_the_recipe_of_the_script_for_tools_wants_that_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(SCRIPT).parent.mkdir(parents=True)
    Path(SCRIPT).write_text(AGENT["files"][SCRIPT])
    migrate(AGENT["run"], capsys)
    words = ["+recipe=my.yaml", "data.path=make:products"]
    assert plan.dry_run(compose_config(words)) == 0
    Path(SCRIPT).unlink()
    with pytest.raises(ConfigError) as error:
        plan.dry_run(compose_config(words))
    assert error.value.code == 2
    assert {p.why for p in error.value.problems} == {f"looked at {folder / SCRIPT}"}


@pytest.mark.slow
def test_the_recipe_of_the_script_for_images_trains_over_shards(
    fast: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    migrate(IMAGES["run"], capsys)
    home = Forked(fast, folder)
    rows = v.rows_file(folder / "rows", (1, 1, 1, 1))
    words = [
        "train", "+recipe=my.yaml", f"model.path={v.folder('qwen2_5_vl')}", f"data.path={rows}",
        "data.prompt_column=prompt", "data.chat=false", "data.columns={answer: solution}",
        "data.max_pixels=null", "model.dtype=float32", "root=runs", "name=run",
        "generation=transformers", "generation.max_completion_length=8", "max_steps=1",
        "train.epochs=null", "reward=[think_format,accuracy,unique_chars]",
        "train.prompts_per_step=2", "distributed.num_processes=2", "distributed.threads=1",
        "logging.console=plain", "algorithm.correction.mode=none",
    ]  # fmt: skip
    assert home(*words, ranks=2) == 0, home.said()
    rows = [row for row in strict(folder / "runs" / "run" / "metrics.jsonl") if "loss" in row]
    assert len(rows) == 1 and rows[0]["grad_norm"] > 0 and rows[0]["reward/accuracy/mean"] == 0
