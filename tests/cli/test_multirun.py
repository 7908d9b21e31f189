"""`rloo train --multirun`: what a job is called, and what it returns to Hydra's sweeper."""

import json
import re
from pathlib import Path

import pytest
from assert_refused import assert_refused
from hydra.core.plugins import Plugins

from rloo_cli.cli import main
from rloo_cli.cli import multirun as cli_multirun
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.launch import launcher
from rloo_cli.utils.errors import ConfigError, DataError, MachineError, Problem

pytestmark = pytest.mark.process

# As Hydra itself has loaded it: not what an import of its module would give.
Sweeper = Plugins.instance().class_name_to_class[
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
]
ROWS = [{"step": 0, "eval_reward": 0.1}, {"step": 1, "reward": 0.3, "kl": 0.2}]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`jobs(*words)`: the names of the runs, and what each returned to Hydra; nothing trains.

    A run whose name has `beta-0.5` in it fails.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rloo"])
    names: list[str] = []
    results: list[float | None] = []

    def train(composed, multirun):
        run = check.check_config(launcher.name_sweep_job(composed))
        names.append(str(run.name))
        if "beta-0.5" in names[-1]:
            raise DataError(Problem("no such rows"))
        folder = Path(run.root, str(run.name))
        folder.mkdir(parents=True, exist_ok=True)
        rows = [*ROWS, {"step": 1, "eval_reward": run.algorithm.beta}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0

    sweep = Sweeper.sweep

    def kept(self, arguments):
        found = sweep(self, arguments)
        results[:] = [job.return_value for batch in found for job in batch]  # of the last pass
        return found

    monkeypatch.setattr(launcher, "launch_run", train)
    monkeypatch.setattr(Sweeper, "sweep", kept)

    def run(*words: str) -> tuple[int, list[str], list[float | None]]:
        names.clear(), results.clear()
        return main.find_verb(["train", *words])(), [*names], [*results]

    return run


def test_jobs_are_named_by_the_keys_that_the_command_line_sweeps_over(jobs, tmp_path: Path) -> None:
    code, names, _ = jobs("-m", "+recipe=smoke", "algorithm.beta=0.01,0.05", "seed=1,2")
    ends = ["beta-0.01-seed-1", "beta-0.01-seed-2", "beta-0.05-seed-1", "beta-0.05-seed-2"]
    assert code == 0 and names == [f"smoke-{end}" for end in ends]
    _, names, _ = jobs("-m", "+recipe=smoke", "algorithm=rloo,grpo", "name=x", "logging.every=2")
    assert names == ["x-rloo", "x-grpo"]  # a choice of a group needs no key before it

    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    for word in ("max_steps=3", "data.path='make:tiny','./rows.jsonl'"):
        _, names, _ = jobs(
            "-m", "+recipe=smoke", "seed=1,2", word
        )  # what no name can hold, or tell
        assert all(re.fullmatch(r"smoke-seed-[12]-[0-9a-f]{6}", name) for name in names)
        assert len({*names}) == len(names) >= 2


def test_every_job_is_checked_before_the_first_one_runs(jobs, tmp_path: Path, capsys) -> None:
    with pytest.raises(ConfigError) as refused:
        jobs("-m", "+recipe=smoke", "algorithm.beta=0.05,-1,-2", "seed=1,2")
    assert [p.what.partition(" is")[0] for p in refused.value.problems] == [
        "algorithm.beta = -1", "algorithm.beta = -2"
    ]  # fmt: skip
    for verb in ("train", "sweep"):  # a key that no job knows is said once
        with pytest.raises(ConfigError) as refused:
            main.find_verb([verb, *["-m"][: verb == "train"], "+recipe=smoke", "train.foo=1,2"])()
        assert [p.where for p in refused.value.problems] == ["command line: train.foo=1"]
    assert jobs("-m", "+recipe=smoke", "train.foo=1,2", "--dry-run")[0] == 2
    assert capsys.readouterr().err.count("train.foo is not a key") == 1
    assert not (tmp_path / "runs").exists()


def test_a_job_returns_its_held_out_score_or_the_metric_that_is_asked_for(jobs, capsys) -> None:
    words = ("-m", "hydra/sweeper=basic", "+recipe=smoke", "algorithm.beta=0.01,0.05")
    assert jobs(*words)[2] == [0.01, 0.05]
    assert jobs(*words, "logging.objective=kl")[2] == [0.2, 0.2]
    assert jobs(*words, "data.eval_split=null")[2] == [0.3, 0.3]  # nothing held out: the reward
    code, _, found = jobs(*words, "logging.objective=eval_rewards")
    assert code == 2 and found == [None, None]
    assert "logging.objective=eval_reward" in capsys.readouterr().err
    code, _, found = jobs(*words, "algorithm.beta=0.5,0.05")
    assert code == 4 and found == [None, 0.05]  # a job that failed has no value


def test_a_sweeper_that_gives_up_is_said_to_and_not_taken_for_a_wrong_config(
    jobs, monkeypatch, capsys
) -> None:
    def optuna(self, arguments):
        self.launcher.launch([[*map(str, arguments)]], initial_job_idx=0)
        raise ValueError("No trials are completed yet.")

    monkeypatch.setattr(Sweeper, "sweep", optuna)
    code, names, _ = jobs("-m", "+recipe=smoke", "name=beta-0.5", "seed=1", "hydra/sweeper=basic")
    said = capsys.readouterr().err
    assert code == 4 and len(names) == 1 and "no such rows" in said
    assert "after 1 jobs" in said and "No trials" in said


def test_a_run_without_any_metric_has_no_value(tmp_path: Path) -> None:
    run = check.check_config(compose_config(["+recipe=smoke", f"root={tmp_path}"]))
    assert cli_multirun.objective_value(run.folder, run.held_out, None) is None
    with pytest.raises(ConfigError, match=r"logging\.objective"):
        cli_multirun.objective_value(run.folder, run.held_out, "kl")


def test_a_search_by_optuna_returns_what_its_jobs_scored_and_names_the_best(jobs, capsys) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="no extra optuna")
    words = ("-m", "+recipe=smoke", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize")
    code, names, _ = jobs(*words, "hydra.sweeper.n_trials=4", "algorithm.beta=interval(0.01,0.4)")
    said = capsys.readouterr().out
    assert code == 0 and len({*names}) == 4
    betas = [float(re.sub(r".*beta-([0-9.]+?)(-[0-9a-f]{6})?$", r"\1", name)) for name in names]
    best = float(re.search(r"optuna: ([0-9.]+) with", said)[1])
    assert best == pytest.approx(max(betas), rel=1e-4)


def test_optunas_sweeper_that_is_not_installed_is_said_with_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(cli_multirun, "OPTUNA_MODULE", "hydra_plugins.nothing_here")
    with pytest.raises(MachineError) as error:
        cli_multirun.check_sweeper(["+recipe=smoke", "hydra/sweeper=optuna"])
    assert_refused(error, 3, fix="rloo-cli[optuna]")
    cli_multirun.check_sweeper(["+recipe=smoke", "hydra/sweeper=basic"])


def test_the_best_job_is_read_from_what_the_sweeper_wrote(tmp_path: Path) -> None:
    assert cli_multirun.best_job(tmp_path) == ""
    path = tmp_path / "optimization_results.yaml"
    path.write_text("name: optuna\nbest_params: {algorithm.beta: 0.03}\nbest_value: 9.781\n")
    assert cli_multirun.best_job(tmp_path).endswith("optuna: 9.781 with algorithm.beta=0.03")
    path.write_text("name: optuna\nsolutions:\n- {params: {seed: 1}, values: [1.0, 2.0]}\n")
    assert cli_multirun.best_job(tmp_path).endswith("optuna: 1, 2 with seed=1")
