"""overlap=stream: groups are trained on while others are being sampled, with the bits of none."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from assert_refused import assert_refused
from fork_cases import Forked
from loop_cases import (
    ENDS,
    PLAIN,
    alone,
    apart,
    cache,
    checked,
    digits,
    flat,
    step,
    timeless,
)
from replay_cases import recorded_run
from resume_cases import attempt, differing, left, temporaries

from rloo_cli.algorithms.common.base import Algorithm
from rloo_cli.algorithms.common.streaming import HOOKS
from rloo_cli.data.batch import Batch
from rloo_cli.data.virtual_time import longest_completion
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.common.stream import StreamSampler
from rloo_cli.generation.hf.generator import TransformersGenerator
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.inspection.step_replay import replay_step
from rloo_cli.run import Run
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import ConfigError, GenerationError, NumbersError, Problem
from rloo_cli.utils.timers import StepTimer

pytestmark = pytest.mark.wide

ORDER = ("train.micro_batch_order=virtual_time", "train.prompts_per_step=6", ENDS)
ORDER = (*ORDER, "train.learning_rate=0.01", "train.micro_batch_tokens=160")
STREAM = "generation.overlap=stream"
SCOPE = "reward.digits.scope=group"
STEPS = 2


def trained(folder: Path, mode: str, *words: str, **rewards: Any) -> Run:
    """A run of a few steps in one mode, with rewards per group."""
    rewards = rewards or {"digits": digits}
    scopes = [f"reward.{name}.scope=group" for name in rewards]
    run = alone(
        folder, *ORDER, *scopes, f"max_steps={STEPS}", *words,
        f"generation.overlap={mode}", f"name={mode}", rewards=rewards,
    )  # fmt: skip
    run_training_loop(run)
    return run


def lines(run: Run) -> list[dict[str, Any]]:
    """The logged steps, without what clocks say."""
    rows = [timeless(row) for row in run.log.metrics_lines]
    return [{k: v for k, v in row.items() if not k.startswith("overlap/")} for row in rows]


def coarse(completion_ids: Any, **_: Any) -> list[float]:
    """A score that siblings often share."""
    return [float(sum(ids) % 2) for ids in completion_ids]


TO_GO = ("algorithm.kl_credit=to_go", "algorithm.kl_in_baseline=false")
SETTINGS = {
    "kl, normalised": ("algorithm.beta=0.1", "algorithm.normalize_advantages=true"),
    "scores, normalised": ("algorithm.beta=0", "algorithm.normalize_advantages=true"),
    "kl in the loss": ("algorithm=grpo", "algorithm.beta=0.1", "algorithm.loss_type=dapo"),
    "kl to go": (*TO_GO, "algorithm.policy_loss=reinforce", "train.micro_batch_size=8"),
    "kl of the model itself": ("algorithm.kl_temperature=one", "generation.temperature=0.8",
                               "algorithm.beta=0.1"),
    "local mean": ("algorithm.loss_agg=token_mean_local", "algorithm.ratio_level=token",
                   "algorithm.mask_truncated_completions=true", "train.layout=padded",
                   "train.micro_batch_tokens=600"),
}  # fmt: skip


@pytest.mark.slow_but("kl in the loss", "local mean")
@pytest.mark.parametrize("words", SETTINGS.values(), ids=SETTINGS)
def test_it_has_the_bits_of_a_run_that_samples_first(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    one, other = (trained(tmp_path, mode, *words) for mode in ("none", "stream"))
    assert torch.equal(flat(one), flat(other)) and lines(one) == lines(other)
    assert all(row["overlap/begun_anew"] == 0 for row in other.log.metrics_lines)


@pytest.mark.parametrize("name", ["kl, normalised", "kl in the loss"])
def test_virtual_time_makes_the_update_of_balanced_micro_batches(name: str, tmp_path: Path) -> None:
    found = []
    for order in ("balanced", "virtual_time"):
        words = (*ORDER, *SETTINGS[name], *PLAIN, f"train.micro_batch_order={order}")
        run = alone(tmp_path, *words, "max_steps=1", f"name={order}")
        found.append(step(run))
    (one, row, _), (other, again, _) = found
    assert apart(other, one) < 5e-5  # summed in another order, and a weight of 1 moves by 1e-5
    for key in ("loss", "policy_loss", "kl_loss", "grad_norm"):
        assert again[key] == pytest.approx(row[key], rel=1e-5, abs=1e-6), key


def test_groups_of_equal_scores_are_dropped_alike(tmp_path: Path) -> None:
    words = "algorithm.zero_std_groups=drop", "algorithm.num_generations=2", "algorithm.beta=0"
    one, other = (trained(tmp_path, mode, *words, coarse=coarse) for mode in ("none", "stream"))
    assert torch.equal(flat(one), flat(other)) and lines(one) == lines(other)
    assert any(0 < row["groups/dropped"] < 6 for row in lines(one))


@pytest.mark.slow
def test_what_a_run_leaves_is_what_a_run_without_it_leaves(tmp_path: Path) -> None:
    words = (*ORDER, "max_steps=5", SCOPE, "eval.max_samples=4")
    for mode in ("none", "stream"):
        assert attempt(tmp_path / mode, *words, f"generation.overlap={mode}", digits=digits)
    one, other = (left(tmp_path / mode / "smoke") for mode in ("none", "stream"))
    assert differing(one, other) == []


@pytest.mark.slow
def test_a_step_is_computed_again_from_its_record(tmp_path: Path) -> None:
    scopes = ("reward.unique_chars.scope=group", "reward.length_tokens.scope=group")
    with mock.patch.dict(os.environ, RLOO_CACHE=cache()):
        folder = recorded_run(tmp_path, "train.micro_batch_order=virtual_time", *scopes, STREAM)
        for number in (1, 4):
            found = replay_step(folder, number)
            assert not found.found and not found.tolerance, found.to_json()


def test_the_first_groups_are_trained_on_while_the_last_is_being_sampled(tmp_path: Path) -> None:
    words = ("generation.max_completion_length=40", "algorithm.num_generations=2")
    words = (*words, "train.micro_batch_tokens=130")
    run = alone(tmp_path, *ORDER, *words, SCOPE, "max_steps=1", STREAM, "seed=5")
    first, waited, finished = threading.Event(), [], []
    note, backward = StreamSampler._note_length, run.engine.backward

    def late(self: StreamSampler, number: int, at_least: int) -> None:
        note(self, number, at_least)
        whole = self._scoring.submitted  # type: ignore[union-attr]
        if len(whole) >= 3 and not waited:
            longest = max(longest_completion(self._groups[i]) for i in whole)
            if at_least < longest + 2:  # not every group that is unfinished is longer already
                return
            finished.extend(whole)
            waited.append(first.wait(20))

    def trains(loss: torch.Tensor, is_last: bool) -> None:
        backward(loss, is_last)
        first.set()

    with (
        mock.patch.object(StreamSampler, "_note_length", late),
        mock.patch.object(run.engine, "backward", trains),
    ):
        run_training_loop(run)
    assert 0 < len(finished) < 6 and waited == [True]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["stream", "ahead"])
def test_no_clock_is_in_the_result(mode: str, seed: int, tmp_path: Path) -> None:
    """What streams has the bits of a run that samples first, what is ahead those of itself."""
    undisturbed = "none" if mode == "stream" else mode
    draw, folders = random.Random(seed), (tmp_path / "wanted", tmp_path / "late")
    for folder in folders:
        folder.mkdir()
    wanted = trained(folders[0], undisturbed)
    record = TransformersGenerator._record

    def slow(*arguments: Any) -> None:
        time.sleep(draw.random() / 100)
        record(*arguments)

    def late(completion_ids: Any, **_: Any) -> list[float]:
        time.sleep(draw.random() / 20)
        return digits(completion_ids)

    with mock.patch.object(TransformersGenerator, "_record", slow):
        run = trained(folders[1], mode, digits=late)
    assert torch.equal(flat(run), flat(wanted)) and lines(run) == lines(wanted)


def test_a_group_above_the_budget_is_trained_as_without_it(tmp_path: Path) -> None:
    words = "train.micro_batch_tokens=70", "algorithm.beta=0.1"
    one, other = (trained(tmp_path, mode, *words) for mode in ("none", "stream"))
    assert torch.equal(flat(one), flat(other)) and lines(one) == lines(other)
    assert any(row["overlap/begun_anew"] for row in other.log.metrics_lines)


def test_a_lost_engine_is_asked_again_by_the_trainer(tmp_path: Path) -> None:
    wanted, next_batch, lost = trained(tmp_path, "none"), Rollouts.next_batch, []

    def losing(self: Rollouts, *arguments: Any) -> Batch:
        batch = next_batch(self, *arguments)
        if threading.current_thread() is not threading.main_thread() and len(lost) < 2:
            lost.append(True)
            raise GenerationError(Problem("the sampler was lost")) from EngineLost("gone")
        return batch

    with mock.patch.object(Rollouts, "next_batch", losing):
        run = trained(tmp_path, "stream")
    assert len(lost) == 2 and torch.equal(flat(run), flat(wanted)) and lines(run) == lines(wanted)


def moody(completion_ids: Any, **_: Any) -> list[float]:
    """A score that draws from a global generator."""
    return [random.random() + len(set(ids)) % 5 for ids in completion_ids]


RESUMED = (*ORDER, STREAM, "checkpoint.every=1", "eval.max_samples=2", "eval.at_start=false")
RESUMED = (*RESUMED, "reward.moody.scope=group", "max_steps=2")


@pytest.mark.slow
def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *RESUMED, looks=looks, moody=moody)
    whole, draw = left(tmp_path / "whole" / "smoke"), random.Random(6)
    root, stops = tmp_path / "run", 0
    while not attempt(
        root, *RESUMED, moody=moody,
        stop_at=draw.randrange(1, len(looks) // 2) if stops < 2 else None,
    ):  # fmt: skip
        stops += 1
    run = root / "smoke"
    assert stops and not differing(whole, left(run)) and not temporaries(run)


@pytest.mark.slow  # sixteen attempts
def test_a_run_stopped_at_many_places_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *RESUMED, looks=looks, moody=moody)
    whole = left(tmp_path / "whole" / "smoke")
    for place in range(3, len(looks) - 2, len(looks) // 8):
        root = tmp_path / f"at{place}"
        if not attempt(root, *RESUMED, moody=moody, stop_at=place):
            assert attempt(root, *RESUMED, moody=moody)
        assert not differing(whole, left(root / "smoke")), place


@pytest.mark.slow  # thirteen processes
def test_a_run_killed_anywhere_goes_on_as_if_it_had_not_been(forked: Forked) -> None:
    scopes = ("reward.unique_chars.scope=group", "reward.length_tokens.scope=group")
    words = ("train", "+recipe=smoke", "max_steps=4", "checkpoint.every=1", "eval.max_samples=2")
    words = (*words, "eval.at_start=false", "train.lr_scheduler=constant", *ORDER, *scopes, STREAM)
    assert forked(*words, "root=whole") == 0, forked.said()
    whole = left(forked.folder / "whole" / "smoke")
    for fault in ("gen.chunk@20", "gen.request@3", "step@2", "logp@5", "ckpt.rename@2", "loss@4"):
        root = f"root={fault}"
        assert forked(*words, root, faults=f"{fault}=kill9") == 6, forked.said()
        assert forked(*words, root, "resume=auto") == 0, forked.said()
        assert not differing(whole, left(forked.folder / fault / "smoke")), fault


def test_a_score_that_others_change_afterwards_stops_the_run(tmp_path: Path) -> None:
    shape = Algorithm.shape_scores

    def centred(self: Any, scores: torch.Tensor, scorable: torch.Tensor, *rest: Any) -> Any:
        shaped = shape(self, scores, scorable, *rest)
        return shaped - shaped[scorable].mean() if scorable.any() else shaped

    run = alone(tmp_path, *ORDER, SCOPE, "max_steps=1", STREAM)
    with (
        mock.patch.object(Algorithm, "shape_scores", centred),
        pytest.raises(NumbersError, match=r"another .*shaped"),
    ):
        run_training_loop(run)
    assert run.state.updates == 0


def test_micro_batches_that_the_whole_batch_does_not_have_stop_the_run(tmp_path: Path) -> None:
    run = alone(tmp_path, *ORDER, SCOPE, "max_steps=1", STREAM)
    turned = "rloo_cli.train.minibatches.order_groups"
    with (
        mock.patch(turned, lambda groups, indices: [*reversed(indices)]),
        pytest.raises(NumbersError, match="other micro-batches than"),
    ):
        run_training_loop(run)
    assert run.state.updates == 0


def test_exposed_hidden_idle_and_the_phases_add_up_to_the_step() -> None:
    clock = [0.0]
    with mock.patch("time.perf_counter", lambda: clock[0]):
        timer = StepTimer()
        parts: list[Any] = [None] * 5
        stream = StreamSampler(Rollouts(*parts, timer, None), timer, mock.Mock())  # type: ignore[arg-type]
        with timer.phase("exposed"):
            clock[0] += 3.0
        with timer.phase("update"):
            clock[0] += 2.0
        with timer.phase("exposed"):
            clock[0] += 1.5
        with timer.phase("optimizer"):
            clock[0] += 0.5
        clock[0] += 0.25
        stream.sampled_s = 6.0
        lap = timer.lap()
    metrics = stream.step_metrics(lap["step_time"], lap["time/exposed"])
    assert metrics["overlap/exposed_s"] == 4.5 and metrics["overlap/hidden_s"] == 1.5
    assert metrics["overlap/idle_s"] == 1.25
    assert sum(v for k, v in lap.items() if k.startswith("time/")) == lap["step_time"] == 7.25
    assert sum(v for k, v in metrics.items() if k.endswith("_s")) == lap["step_time"]


REFUSED = {
    "train.micro_batch_order=balanced": "needs train.micro_batch_order=virtual_time",
    "reward.digits.scope=batch": "reward.digits.scope=batch do not go together",
    "model.ref_offload=true": "model.ref_offload do not go together",
    "lora=default": "model.lora do not go together",
    "distributed=ddp": "trains in one process",
    "generation=vllm_colocate": "needs a sampler of its own",
    "generation=replay": "needs a sampler of its own",
    "agent=tools agent.tools=[rloo_cli.data.synthetic.tool_tasks:multiply]": "agent",
    "algorithm=ppo": "knows no advantages of single tokens",
    "algorithm=reinforce_pp": "knows no advantages of single tokens",
    "algorithm=remax": "a greedy completion per prompt",
    "algorithm.num_minibatches=2": "trains in the first pass",
    "algorithm.num_iterations=2": "makes one update of each step's completions",
    "train.old_logp=separate": "trains in the first pass",
    "model.disable_dropout=false": "trains in the first pass",
    "algorithm.normalize_rewards=true": "algorithm.normalize_rewards=true",
    "algorithm.multi_reward=normalize_then_sum": "algorithm.multi_reward=normalize_then_sum",
    "algorithm.zero_std_groups=resample": "algorithm.zero_std_groups=resample",
    "algorithm.baseline=batch_mean": "algorithm.baseline=batch_mean",
    "algorithm.advantage_scale=batch": "algorithm.advantage_scale=batch",
    "algorithm.entropy_coef=0.1": "knows no entropy bonus",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_needs_the_whole_step_first_is_refused(word: str) -> None:
    words = (*ORDER, SCOPE, STREAM, *word.split())
    with pytest.raises(ConfigError) as raised:
        checked(("digits",), words)
    assert REFUSED[word] in str(raised.value)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_the_users_own_is_refused_since_it_may_need_the_whole_step(
    hook: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from rloo_cli.plugin import RLOO, Switches\n\n\nclass Config(Switches): ...\n\n\n"
        "class Own(RLOO):\n"
        f"    def {hook}(self, *inputs):\n        return super().{hook}(*inputs)\n"
    )
    with pytest.raises(ConfigError) as raised:
        checked(("digits",), (*ORDER, SCOPE, STREAM, f"algorithm.name={file}"))
    assert_refused(raised, 2, hook)
