"""`rloo train --multirun +recipe=compare`: the recipe brings its sweep, the runs have names."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from assert_refused import assert_refused
from cli_cases import Rloo

from rloo_cli.cli import main
from rloo_cli.config import compose
from rloo_cli.config.user_files import register_recipe_file
from rloo_cli.launch import launcher
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.process

ALGORITHMS = ("rloo", "grpo", "reinforce", "reinforce_pp", "ppo")
SWEPT = ("algorithm", "seed")


@pytest.fixture
def jobs(monkeypatch):
    """Words -> the names of the runs; what each would check and plan takes a second."""
    found: list[str] = []

    def job(composed, multirun):
        assert multirun
        found.append(str(launcher.name_sweep_job(composed).values["name"]))
        return 0

    def names(*words: str) -> list[str]:
        assert main.find_verb(["train", "--multirun", *words])() == 0
        return found

    monkeypatch.setattr(launcher, "launch_run", job)
    monkeypatch.setattr("sys.argv", ["rloo"])
    return names


@pytest.mark.slow
def test_the_plain_command_makes_25_runs_with_names_of_their_own(jobs):
    wanted = [f"compare-{name}-seed-{seed}" for name in ALGORITHMS for seed in range(1, 6)]
    assert jobs("+recipe=compare") == wanted


def test_words_of_the_command_line_narrow_the_sweep_and_leave_the_names(jobs):
    found = jobs("seed=2,7", "+recipe=compare", "algorithm=rloo")
    assert found == ["compare-rloo-seed-2", "compare-rloo-seed-7"]


def test_without_multirun_the_recipe_is_one_run():
    composed = compose.compose_config(["+recipe=compare"])
    assert composed.values["name"] == "compare" and composed.values["seed"] == 1
    assert composed.swept_keys == SWEPT


def test_every_recipe_that_compares_has_the_same_work_for_all():
    for recipe in ("compare", "compare_tldr", "compare_tldr_1b"):
        own = yaml.safe_load((paths.RECIPES / f"{recipe}.yaml").read_text())
        sweep = own["hydra"]["sweeper"]["params"]
        assert sweep["algorithm"] == ",".join(ALGORITHMS) and "++seed" in sweep
        first, base = (
            compose.compose_config([f"+recipe={n}"]).values for n in (recipe, own["defaults"][0])
        )
        assert first["algorithm"]["num_generations"] == base["algorithm"]["num_generations"]
        assert first["resume"] == "auto"  # the same command again goes on


def apart(*words: str, name: str = "compare") -> str:
    composed = compose.compose_config(["+recipe=quickstart"])
    values = composed.values | {"name": name}
    given = replace(composed, values=values, user_overrides=words, swept_keys=SWEPT)
    return str(launcher.name_sweep_job(given).values["name"])


def test_a_word_beside_the_sweeps_own_makes_another_run_of_it():
    plain = apart("+recipe=compare", "algorithm=ppo", "seed=3")
    assert plain == "compare-ppo-seed-3"
    assert apart("+recipe=compare", "algorithm=ppo", "seed=3", "root=x", "resume=auto") == plain
    others = [apart("+recipe=compare", "algorithm=ppo", "seed=3", f"max_steps={n}") for n in (1, 2)]
    assert all(re.fullmatch(rf"{plain}-[0-9a-f]{{6}}", name) for name in others)
    assert len({*others}) == 2


def test_a_value_that_is_no_name_is_told_by_the_hash():
    name = apart("seed=3", "algorithm=${other}")
    assert re.fullmatch(r"compare-.*-[0-9a-f]{6}", name)


def mine(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(f"# Mine.\nname: mine\n{text}")
    return path


def refused(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        register_recipe_file(path, "here", paths.group_choices([]))
    return error.value


def test_a_copy_of_the_recipe_is_ones_own(rloo: Rloo):
    assert rloo("recipes", "copy", "compare", "my.yaml").code == 0
    words = ["-m", "+recipe=my.yaml", "algorithm=rloo", "seed=4", "name=mine", "--dry-run"]
    ended = rloo("train", *words)
    assert "runs/mine-rloo-seed-4\n" in ended.out, ended.said


@pytest.mark.parametrize(
    "text",
    [
        "hydra: {sweeper: {params: {algorithm: rloo}, max_batch_size: 1}}",
        "hydra: {sweeper: {_target_: os.system}}",
        "hydra: {sweeper: {params: {algorithm: rloo}}, run: {dir: pwned}}",
        "hydra: {launcher: {params: {algorithm: rloo}}}",
        "hydra: {sweeper: null}",
        "hydra.sweeper: {params: {algorithm: rloo}}",
        "hydra: {sweeper: {params: {hydra.run.dir: pwned}}}",
        "hydra: {sweeper: {params: {++hydra.run.dir: pwned}}}",
        "hydra: {sweeper: {params: {hydra/launcher: joblib}}}",
        "hydra: {sweeper: {params: {~seed: 1}}}",
    ],
)
def test_a_recipe_of_ones_own_says_nothing_else_to_hydra(tmp_path, text):
    assert_refused(refused(mine(tmp_path, text)), key="not a key")


def test_a_key_that_the_command_line_could_not_narrow_is_refused(tmp_path, sentence):
    error = refused(mine(tmp_path, "hydra: {sweeper: {params: {seed: '1,2'}}}"))
    assert_refused(error, key="++seed")
    sentence(error)
    error = refused(mine(tmp_path, "hydra: {sweeper: {params: {algorithm: [rloo]}}}"))
    assert_refused(error, key="algorithm")
    sentence(error)


@pytest.mark.slow
def test_a_sweep_of_two_short_runs_is_trained_and_compared(rloo: Rloo):
    words = ["-m", "+recipe=compare", "algorithm=rloo", "seed=1,2", "max_steps=4", "eval.every=2"]
    small = ["train.prompts_per_step=4", "eval.max_samples=20"]
    ended = rloo("train", *words, *small)
    assert ended.code == 0, ended.said
    again = rloo("train", *words, *small)
    assert again.out.count("nothing to do") == 2
    got = rloo("compare", "compare-*")
    assert got.code == 0, got.said
    table = (rloo.folder / "runs" / "comparison" / "table.md").read_text()
    assert table.splitlines()[2].startswith("| rloo | 2 | ")
    assert (rloo.folder / "runs" / "comparison" / "curves.png").stat().st_size > 10_000
