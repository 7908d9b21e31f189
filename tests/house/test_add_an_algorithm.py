"""docs/algorithms.md does what it says: its two files, put where it says, train."""

import dataclasses
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loop_cases import EXACT, alone, apart, cache, leave_one_out, step
from test_docs import PAGES, of_rloo, shown_files, table_rows

from rloo_cli.config.hooks import HOOKS
from rloo_cli.data.packing import MicroBatch
from rloo_cli.plugin import Loss, LossInputs
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

PAGE = "algorithms.md"
MEDIAN = ("--config-dir=my_conf", "algorithm=median")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, as its reader has one."""
    shown_files(tmp_path, PAGES[PAGE])
    monkeypatch.chdir(tmp_path)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")) == [
        "median.py", "my_conf/algorithm/median.yaml", "my_conf/algorithm/near.yaml", "near.py",
    ]  # fmt: skip
    return tmp_path


def test_the_page_names_everything_that_a_file_may_define() -> None:
    names = {w for row in table_rows(PAGES[PAGE]) for w in re.findall(r"`(\w+)`", row[0])}
    assert set(HOOKS) <= names


def test_the_page_names_every_field_that_a_loss_reads_and_returns() -> None:
    rows = table_rows(PAGES[PAGE])
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row[0])}
    fields = {f.name for part in (LossInputs, MicroBatch, Loss) for f in dataclasses.fields(part)}
    assert fields <= named


def test_a_loss_logs_numbers_of_its_own_over_all_that_is_trained_on(root: Path) -> None:
    words = ("--config-dir=my_conf", "algorithm=near", "train.micro_batch_tokens=64")
    run = alone(root, *words)
    inner, calls = run.algorithm.loss, []

    def watched(inputs: LossInputs) -> Loss:
        calls.append(inputs)
        return inner(inputs)

    run.algorithm.loss = watched
    row = step(run)[1]
    change = [((c.logp - c.old_logp).square().detach(), c.micro_batch.mask.bool()) for c in calls]
    every = torch.cat([values[counted].double() for values, counted in change])
    assert len(calls) > 2 and float(every.mean()) > 0
    assert row["algorithm/change"] == pytest.approx(float(every.mean()))


@pytest.mark.parametrize("made", ["1.0", "change.sum()", "change[1:]"])
def test_a_number_of_a_loss_that_is_not_per_token_or_completion_is_refused(
    root: Path, made: str
) -> None:
    file = root / "near.py"
    file.write_text(file.read_text().replace('{"change": change}', f'{{"change": {made}}}'))
    run = alone(root, "--config-dir=my_conf", "algorithm=near")
    with pytest.raises(ConfigError) as refused:
        step(run)
    assert refused.value.problems[0].where.startswith(str(file))


def by_hand(rewards: list[list[float]], limit: float) -> list[list[float]]:
    found = []
    for group in rewards:
        medians = [statistics.median(group[:k] + group[k + 1 :]) for k in range(len(group))]
        found.append([max(-limit, min(limit, r - m)) for r, m in zip(group, medians, strict=True)])
    return found


def test_the_advantages_of_a_step_are_those_of_the_siblings_median(root: Path) -> None:
    run = alone(root, *MEDIAN, "algorithm.limit=1.5", "algorithm.beta=0.3")
    moved, row, batch = step(run)
    assert batch.reward is not None and batch.advantage is not None
    wanted = by_hand(batch.reward.tolist(), 1.5)
    assert batch.advantage.tolist() == [pytest.approx(group) for group in wanted]
    assert {1.5, -1.5} <= {round(a, 9) for group in wanted for a in group}
    assert batch.advantage.tolist() != leave_one_out(batch.reward.tolist())
    assert float(moved.norm()) > 0 and row["grad_norm"] > 0


def test_without_a_limit_that_acts_two_siblings_have_the_gradient_of_rloo(root: Path) -> None:
    words = ("algorithm.num_generations=2", "train.optimizer=torch.optim:SGD")  # median = mean
    own = step(alone(root, *MEDIAN, "algorithm.limit=1e9", "name=own", *words))[0]
    other = step(alone(root, "name=rloo", *words))[0]
    assert float(other.norm()) > 0 and apart(own, other) < EXACT


@pytest.mark.slow
def test_the_command_of_the_page_trains(root: Path) -> None:
    command = next(c.text for c in of_rloo(PAGE) if "+debug=cpu" in c.text)
    words = [sys.executable, "-P", "-m", "rloo_cli", *shlex.split(command)[1:]]
    done = subprocess.run(
        words, capture_output=True, text=True, env=os.environ | {"RLOO_CACHE": cache()}
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((root / "runs/debug/smoke/summary.json").read_text())
    assert summary["final"] and "median.py" in (root / "runs/debug/smoke/config.yaml").read_text()
