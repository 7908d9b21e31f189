"""overlap=ahead: the next batch is sampled beside the update, and no clock is in the result."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fork_cases import Forked
from loop_cases import ENDS, alone, digits, flat, sampled
from resume_cases import attempt, differing, left, temporaries

from rloo_cli.generation.common.ahead import AheadSampler
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.policy.model import Policy
from rloo_cli.reporting.update_metrics import sum_over_ranks
from rloo_cli.run import StepProgress
from rloo_cli.train import loop, step
from rloo_cli.train.advantages import update_algorithm_state
from rloo_cli.train.loop import run_training_loop, sync_weights
from rloo_cli.train.step import update_policy
from rloo_cli.utils.errors import GenerationError, Problem, Stopped
from rloo_cli.utils.timers import StepTimer

pytestmark = pytest.mark.wide

AHEAD = ("generation.overlap=ahead", "train.learning_rate=0.01", ENDS)
STEPS = 5


def serial_weights(folder: Path, *words: str) -> tuple[torch.Tensor, list[list[int]]]:
    """All of overlap=ahead without a thread: sample the next batch, update on this one."""
    run = alone(folder, *AHEAD, *words, f"max_steps={STEPS}")
    run.source, lags = run.rollouts, []
    sync_weights(run)
    batch = sampled(run)
    while run.state.step < STEPS:
        state, following = run.state, None
        if state.step + 1 < STEPS:
            seen = state.seen_by_rewards(run)
            following = run.rollouts.next_batch(state.step + 1, state.place + batch.draws, seen)
        lags.append([state.updates - r.weight_version for g in batch.groups for r in g.rollouts])
        updates = StepProgress(batch)
        update_policy(run, updates)
        sync_weights(run)
        sum_over_ranks(updates.updates, run.world)
        state.advance(batch)
        update_algorithm_state(run, batch)
        batch = following
    return flat(run), lags


@pytest.mark.parametrize(
    "words", [(), ("algorithm.zero_std_groups=resample",)], ids=["", "resample"]
)
def test_it_is_equal_to_a_serial_program_that_samples_first_and_updates_then(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    wanted, lags = serial_weights(tmp_path, *words, "name=serial")
    assert [set(of_step) for of_step in lags] == [{0}, *[{1}] * (STEPS - 1)]
    draw, next_batch, wait = random.Random(3), Rollouts.next_batch, AheadSampler.wait
    check_weights = AheadSampler.check_weights
    waits, checked = threading.Event(), list[bool]()

    def waited_for(ahead: AheadSampler) -> None:
        if ahead._thread is not None:
            waits.set()
        wait(ahead)

    def check(ahead: AheadSampler, policy: Policy) -> None:
        checked.append(ahead.batch is not None)
        check_weights(ahead, policy)

    def slow(*arguments: Any) -> Any:
        time.sleep(draw.random() / 20)
        if arguments[1] % 2:  # every other batch begins only when the trainer waits for it
            assert waits.wait(60)
        found = next_batch(*arguments)
        time.sleep(draw.random() / 20)
        waits.clear()
        return found

    def late(completion_ids: Any, **_: Any) -> list[float]:
        time.sleep(draw.random() / 50)
        return digits(completion_ids)

    run = alone(
        tmp_path, *AHEAD, *words, f"max_steps={STEPS}", "name=ahead", rewards={"digits": late}
    )
    with (
        mock.patch.object(Rollouts, "next_batch", slow),
        mock.patch.object(AheadSampler, "wait", waited_for),
        mock.patch.object(AheadSampler, "check_weights", check),
    ):
        run_training_loop(run)
    assert torch.equal(flat(run), wanted) and checked == [True] * (STEPS - 1) + [False]
    rows = [row for row in run.log.metrics_lines if "loss" in row]
    assert [row["staleness/max"] for row in rows] == [0, *[1] * (STEPS - 1)]
    assert all(row["overlap/hidden_s"] > 0 for row in rows[:-1])


def test_a_batch_whose_engine_was_lost_in_the_thread_is_sampled_anew_by_the_trainer(
    tmp_path: Path,
) -> None:
    wanted, _ = serial_weights(tmp_path, "name=serial")
    next_batch, lost = Rollouts.next_batch, []

    def losing(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and len(lost) < 2:
            lost.append(True)
            raise GenerationError(Problem("the sampler was lost")) from EngineLost("gone")
        return next_batch(*arguments)

    run = alone(tmp_path, *AHEAD, f"max_steps={STEPS}", "name=ahead")
    with mock.patch.object(Rollouts, "next_batch", losing):
        run_training_loop(run)
    assert len(lost) == 2 and torch.equal(flat(run), wanted)


def test_exposed_hidden_idle_and_the_phases_add_up_to_the_step() -> None:
    clock = [0.0]
    with mock.patch("time.perf_counter", lambda: clock[0]):
        timer = StepTimer()
        parts: list[Any] = [None] * 5
        ahead = AheadSampler(Rollouts(*parts, timer, None))  # type: ignore[arg-type]
        with timer.phase("exposed"):
            clock[0] += 4.5
        with timer.phase("update"):
            clock[0] += 2.0
        with timer.phase("optimizer"):
            clock[0] += 0.5
        clock[0] += 0.25
        ahead.hidden_s = 1.5
        lap = timer.lap()
    metrics = ahead.step_metrics(lap["step_time"], lap["time/exposed"])
    assert metrics["overlap/exposed_s"] == 4.5 and metrics["overlap/hidden_s"] == 1.5
    assert metrics["overlap/idle_s"] == 1.25
    assert sum(v for k, v in lap.items() if k.startswith("time/")) == lap["step_time"] == 7.25
    assert sum(metrics.values()) == lap["step_time"]


def moody(completion_ids: Any, **_: Any) -> list[float]:
    """A score that draws from a global generator."""
    return [random.random() + len(set(ids)) % 5 for ids in completion_ids]


@contextmanager
def stopped_at(module: Any, name: str, step: int) -> Iterator[None]:
    """A stop where this function is called with so many steps done; the thread draws at once."""
    inner, start = getattr(module, name), AheadSampler.begin_next

    def stop(run: Any, *arguments: Any) -> Any:
        if run.state.step == step:
            raise Stopped(Problem("stopped by SIGTERM"))
        return inner(run, *arguments)

    def draw_at_once(self: AheadSampler, *arguments: Any) -> None:
        start(self, *arguments)
        assert self._thread is not None
        self._thread.join()  # before anything of the update

    with (
        mock.patch.object(module, name, stop),
        mock.patch.object(AheadSampler, "begin_next", draw_at_once),
    ):
        yield


PLACES = (  # beside an update with the next batch drawn, between two steps, after an update
    (step, "take_optimizer_step", 1), (loop, "evaluate_and_checkpoint", 2),
    (loop, "record_rollouts", 2),
)  # fmt: skip


def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    looks: list[int] = []
    words = (*AHEAD, "checkpoint.every=2")
    assert attempt(tmp_path / "whole", *words, looks=looks, moody=moody)
    whole, draw = left(tmp_path / "whole" / "smoke"), random.Random(5)
    for point in PLACES:
        with stopped_at(*point):
            assert not attempt(tmp_path / "cut", *words, moody=moody)
    anywhere = draw.randrange(1, len(looks) // 2)
    assert not attempt(tmp_path / "chance", *words, stop_at=anywhere, moody=moody)
    for name in ("cut", "chance"):
        assert attempt(tmp_path / name, *words, moody=moody)
        run = tmp_path / name / "smoke"
        assert not differing(whole, left(run)) and not temporaries(run), name


@pytest.mark.slow  # thirteen processes
def test_a_run_killed_anywhere_goes_on_as_if_it_had_not_been(forked: Forked) -> None:
    words = ("train", "+recipe=smoke", "max_steps=4", "checkpoint.every=1", "eval.max_samples=2",
             "eval.at_start=false", *AHEAD, "train.lr_scheduler=constant")  # fmt: skip
    assert forked(*words, "root=whole") == 0, forked.said()
    whole = left(forked.folder / "whole" / "smoke")
    for fault in ("gen.chunk@40", "gen.request@3", "step@2", "step@3", "ckpt.rename@2", "reward@2"):
        root = f"root={fault}"
        assert forked(*words, root, faults=f"{fault}=kill9") == 6, forked.said()
        assert forked(*words, root, "resume=auto") == 0, forked.said()
        assert not differing(whole, left(forked.folder / fault / "smoke")), fault


def test_a_sampler_with_other_weights_stops_the_run_within_the_step(tmp_path: Path) -> None:
    run = alone(tmp_path, *AHEAD, "max_steps=4")
    replica, inner = run.generator, run.generator.load
    loads: list[int] = []

    def load(policy: Any, version: int) -> None:
        loads.append(version)
        if len(loads) < 2:  # the second update does not reach the sampler, which says it did
            inner(policy, version)
        replica.inner.load(policy, version)

    with mock.patch.object(replica, "load", load), pytest.raises(GenerationError) as raised:
        run_training_loop(run)
    assert "had other weights" in str(raised.value)
    assert run.state.updates == 1 and run.state.step == 1


def test_the_kl_is_that_of_the_policy_that_sampled(tmp_path: Path) -> None:
    run = alone(tmp_path, *AHEAD, "max_steps=3", "algorithm.beta=0.1")
    batches: list[Any] = []
    take = run.optimizer.step

    def step(norm: torch.Tensor) -> None:
        batches.append(run.step_progress.batch)  # type: ignore[union-attr]
        take(norm)

    with mock.patch.object(run.optimizer, "step", step):
        run_training_loop(run)
    batch = batches[-1]
    for i in batch.active:
        group = batch.groups[i]
        for k, rollout in enumerate(group.rollouts):
            sampler = torch.tensor(rollout.sampled_logp, dtype=torch.float64)
            reference, older = group.ref_logp[k].double(), group.old_logp[k].double()
            assert float(batch.kl[i, k]) == pytest.approx(
                float((sampler - reference).sum()), abs=1e-4
            )
            assert (older - sampler).abs().max() > 1e-3  # it is another policy by now
