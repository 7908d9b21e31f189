"""What a run left, but for times: to compare a resumed run with one that was left alone."""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cli_cases import strict
from fork_cases import Forked
from loop_cases import cache, checked
from safetensors.torch import load_file
from torch import Tensor

from rloo_cli.checkpoint import manifest
from rloo_cli.config import synthetic
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.provenance import ConfigSources
from rloo_cli.launch import launcher
from rloo_cli.train.worker import run_training
from rloo_cli.utils import signals
from rloo_cli.utils.errors import Problem, Stopped
from rloo_cli.utils.files import update_json

TIMED = re.compile(
    r"step_time|eps|(time|perf|memory|overlap)/.*|reward/.*/time|eval_.*(time|seconds).*"
)
TEMPORARY = (".tmp", ".trash")


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what depends on the machine's speed."""
    return {k: v for k, v in row.items() if not TIMED.fullmatch(k)}


def left(run: Path) -> dict[str, Any]:
    """Weights, optimizer, random states, metrics, samples and ledger of a finished run."""
    found: dict[str, Any] = {
        "metrics": [untimed(r) for r in strict(run / "metrics.jsonl")],
        "samples": {p.name: p.read_text() for p in sorted((run / "samples").iterdir())},
        "ledger": (run / "ledger.jsonl").read_text(),
        "weights": tensors(run / "final" / "model.safetensors"),
    }
    newest = manifest.list_checkpoints(run)[0]
    for path in sorted((newest / "trainer").glob("*.safetensors")):
        found[path.name] = tensors(path)
    state = json.loads((newest / "trainer" / "state.json").read_text())
    found["state"] = {k: state[k] for k in ("state", "optimizer", "rng", "fingerprint", "steps")}
    found["state"]["state"].pop("evaluated")  # a stop in the last evaluation was saved before it
    return found


def tensors(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a file."""
    return {n: t.contiguous().view(-1).numpy().tobytes() for n, t in load_file(path).items()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What of two runs' `left` is not equal."""
    return [k for k in {**one, **other} if one.get(k) != other.get(k)]


def temporaries(run: Path) -> list[str]:
    """What a save that was cut short leaves."""
    return [p.name for p in run.rglob(".*") if p.name.startswith(TEMPORARY) or ".tmp" in p.name]


def attempt(
    root: Path,
    *words: str,
    stop_at: int | None = None,
    looks: list[int] | None = None,
    **functions: Any,
) -> bool:
    """One attempt at the smoke recipe in this process, with resume=auto; whether it finished.

    `stop_at`: the n-th look at the signals finds one. `looks` gets a number per look.
    `functions`: rewards in place of the recipe's. All else is as `rloo train` does it.
    """
    settings = checked(tuple(functions), (f"root={root}", "resume=auto", "max_steps=4", *words))
    start = launcher.plan_attempt(settings)
    if start.done:
        return True
    launcher.write_attempt_files(start, settings, ComposedConfig({}, ConfigSources()))
    looks = [] if looks is None else looks

    def look() -> None:
        looks.append(len(looks) + 1)
        if looks[-1] == stop_at:
            raise Stopped(Problem("stopped by SIGTERM"))

    facts = start.folder / "run.json"
    here = mock.patch.dict(os.environ, RLOO_CACHE=cache())
    with (
        here,
        mock.patch.object(signals, "raise_if_stopped", look),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            run_training(settings, start.folder, functions, start)
        except Stopped:
            update_json(facts, state="stopped")
            return False
    update_json(facts, state="finished")
    return True


WORDS = (
    "train", "+recipe=smoke", "max_steps=3", "checkpoint.every=1", "checkpoint.keep_last=3",
    "eval.at_start=false", "eval.max_samples=2", "train.lr_scheduler=constant",
)  # fmt: skip
STOP = "gen.request@3=term"  # with two steps done


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, fast: dict[str, str]) -> Path:
    """A folder with a run that was stopped after two of three steps."""
    folder = tmp_path_factory.mktemp("stopped")
    forked = Forked(fast, folder)
    assert forked(*WORDS, faults=STOP) == 75
    return folder


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Iterator[Path]:
    """The same, for one test alone: the run's folder."""
    shutil.copytree(stopped / "runs", tmp_path / "runs", symlinks=True)
    yield tmp_path / "runs" / "smoke"


def state(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run, by name."""
    return load_file(run / "final" / "model.safetensors")


def update_apart(one: Path, other: Path, model: str = "make:tiny") -> float:
    """The largest relative difference of two runs' whole updates of this model, over tensors.

    Two sums that differ in their last bit may leave a weight one rounding apart, which of a norm's
    weight of 1 is a tenth of a small update: so much is no difference. Nor is a weight that only
    rounding moves, as the bias of attention's keys, whose gradient is 0.
    """
    begin = load_file(Path(synthetic.resolve_model_path(model)) / "model.safetensors")
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()

    def gap(name: str) -> Tensor:
        rounding = torch.finfo(torch.float32).eps * a[name].abs()
        return ((a[name] - b[name]).abs() - rounding).clamp(min=0).norm()

    moved = {name: max(float((w[name] - begin[name]).norm()) for w in (a, b)) for name in a}
    most = max(moved.values())

    def apart(name: str) -> float:
        if torch.equal(a[name], b[name]) or moved[name] < 1e-8 * most:
            return 0.0  # of a frozen weight there is no change to compare with
        return float(gap(name) / (a[name] - begin[name]).norm())

    return max(map(apart, a))
