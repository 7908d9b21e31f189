"""overlap=carry: groups go on under the next weights, and every token is told whose it is."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from assert_refused import assert_refused
from carry_cases import CARRY, carrying, cutting
from fork_cases import Forked
from ledger_audit import audit_ledger
from loop_cases import cache, digits, row_logp
from resume_cases import attempt, strict, temporaries

from rloo_cli.checkpoint import manifest, restore
from rloo_cli.config import check
from rloo_cli.data import rollout_files
from rloo_cli.data.batch import Batch
from rloo_cli.data.rollout_record import read_rollout_record
from rloo_cli.generation.common.carry import CarrySampler
from rloo_cli.generation.common.open_groups import OpenCompletion
from rloo_cli.inspection.step_replay import replay_step
from rloo_cli.run import Run
from rloo_cli.train import worker
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem, Stopped
from rloo_cli.utils.files import write_text

pytestmark = pytest.mark.wide

STEPS, MAX_LAG = 6, 2
RECORDED = (*CARRY, "logging.rollouts_every=1", "checkpoint.every=2")


def lags(folder: Path, step: int) -> list[list[int]]:
    """How old each token of a recorded step was, by completion."""
    batch = read_rollout_record(folder, step).batch
    return [[step - 1 - v for v in r.token_versions] for g in batch.groups for r in g.rollouts]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, Any]]]:
    """A run of six steps in which completions were cut, and the weights before each of them."""
    folder, weights = tmp_path_factory.mktemp("trained"), list[dict[str, Any]]()
    with cutting():
        # Without noise on its weights, so that `rloo replay` can begin with the same model.
        run = carrying(folder, f"max_steps={STEPS}", "logging.rollouts_every=1", noise=0.0)
        load = run.generator.load

        def keep(policy: Any, version: int) -> None:
            weights.append({n: w.clone() for n, w in policy.model.state_dict().items()})
            load(policy, version)

        with mock.patch.object(run.generator, "load", keep):
            run_training_loop(run)
    return run, weights


def test_every_tokens_log_probability_is_that_of_the_weights_it_is_told_to_be_of(
    trained: tuple[Run, list[dict[str, Any]]],
) -> None:
    run, weights = trained
    cuts = 0
    for step in range(1, STEPS + 1):
        batch = read_rollout_record(run.folder, step).batch
        for p, group in enumerate(batch.groups):
            for k, rollout in enumerate(group.rollouts):
                got = torch.tensor(rollout.token_versions)
                assert 0 <= step - 1 - int(got.min()) <= MAX_LAG
                cuts += len(rollout.version_spans or []) > 1
                for version in got.unique().tolist():
                    run.policy.model.load_state_dict(weights[version])
                    with torch.no_grad():
                        own = row_logp(run.policy, batch, p, k)
                    gap = own - torch.tensor(rollout.behaviour_logp)
                    assert gap[got == version].abs().max() < 1e-4
    assert cuts > 5  # completions that several versions sampled


def test_what_a_step_says_of_lags_is_what_its_record_has(
    trained: tuple[Run, list[dict[str, Any]]],
) -> None:
    run, _ = trained
    rows = [row for row in run.log.metrics_lines if "loss" in row]
    for step, row in enumerate(rows, 1):
        found = [lag for of_completion in lags(run.folder, step) for lag in of_completion]
        assert row["staleness/mean"] == pytest.approx(sum(found) / len(found))
        assert row["staleness/max"] == max(found)
        spans = [len({*of_completion}) for of_completion in lags(run.folder, step)]
        assert row["staleness/span_max"] == max(spans)
        for lag in {*found}:
            assert row[f"staleness/frac_lag{lag}"] == pytest.approx(found.count(lag) / len(found))
            assert row[f"sampling/logp_diff_lag{lag}"] < 1e-5 if lag == 0 else True
        assert row["overlap/paced_s"] <= row["overlap/exposed_s"] <= row["step_time"]
    assert max(row["staleness/span_max"] for row in rows) > 1
    assert any(row["sampling/logp_diff_lag1"] > 1e-3 for row in rows[1:])


def test_the_ledger_has_every_prompt_that_was_drawn(
    trained: tuple[Run, list[dict[str, Any]]],
) -> None:
    run, _ = trained
    audit = audit_ledger(run.folder)
    assert audit.fates == {"trained": STEPS * 4} and not audit.pending
    lines = strict(run.folder / "ledger.jsonl")[1:]
    assert any(line["pending"] for line in lines[:-1])
    drawn = [line["place"] + line["draws"] + len(line["pending"]) for line in lines]
    assert drawn == sorted(drawn)


@contextmanager
def tiny_cache() -> Iterator[None]:
    with mock.patch.dict("os.environ", RLOO_CACHE=cache()):
        yield


def check_replays(folder: Path) -> None:
    """Every recorded step comes out bit for bit."""
    for step in rollout_files.list_rollout_files(folder):
        with tiny_cache():
            found = replay_step(folder, step)
        assert found.comparison.first is None and found.tolerance == 0, found.comparison.first


def test_a_step_with_tokens_of_several_versions_is_computed_again_bit_for_bit(
    trained: tuple[Run, list[dict[str, Any]]],
) -> None:
    run, _ = trained
    cut = [s for s in range(1, STEPS) if any(len({*row}) > 1 for row in lags(run.folder, s))]
    write_text(run.folder / "config.yaml", yaml.safe_dump(check.dump_config(run.config)))
    with tiny_cache():
        found = replay_step(run.folder, cut[0])
    assert found.comparison.first is None and found.tolerance == 0, found.comparison.first


def begun_completions(run: Run) -> list[OpenCompletion]:
    """Those that have tokens and go on."""
    assert isinstance(run.source, CarrySampler)
    return [c for group in run.source.groups for c in group.unfinished if c.ids]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run that was stopped with begun completions under way, and its checkpoint."""
    run = carrying(tmp_path_factory.mktemp("stopped"), f"max_steps={STEPS}")
    take, steps = run.optimizer.step, list[int]()

    def step(norm: torch.Tensor) -> None:
        steps.append(run.state.step)
        if len(steps) > 1 and begun_completions(run):
            raise Stopped(Problem("stopped by SIGTERM"))
        take(norm)

    with cutting(), mock.patch.object(run.optimizer, "step", step), pytest.raises(Stopped) as got:
        run_training_loop(run)
    worker._save_what_is_done(run, got.value)
    return run, manifest.list_checkpoints(run.folder)[0]


def resumed(run: Run, checkpoint: Path, *words: str) -> Run:
    """Another run that goes on from there."""
    other = carrying(run.folder.parent, f"max_steps={STEPS}", "name=resumed", *words)
    other.policy.model.load_state_dict(run.policy.model.state_dict())
    restore.restore_run(other, checkpoint)
    other.ledger.path.unlink()  # it begins at the first step
    k = other.config.algorithm.num_generations
    other.ledger.open(other.prompts, k, other.state.place, other.state.step)
    return other


def test_groups_under_way_go_on_from_the_checkpoint_with_the_tokens_they_have(
    stopped: tuple[Run, Path],
) -> None:
    run, checkpoint = stopped
    other = resumed(run, checkpoint)
    assert isinstance(run.source, CarrySampler) and isinstance(other.source, CarrySampler)
    assert other.source.next_offset == run.source.next_offset and len(run.source.groups) >= 4
    kept = {}
    for before, after in zip(run.source.groups, other.source.groups, strict=True):
        assert before.completions == after.completions and before.deadline == after.deadline
        assert before.group.prompt_offset == after.group.prompt_offset
        kept |= {c.seed: [*c.ids] for c in after.completions if c.ids}
    assert begun_completions(run)
    found = dict[int, list[int]]()
    take = other.source.next_batch

    def take_batch(*arguments: Any) -> Batch:
        batch = take(*arguments)
        found.update({r.seed: r.completion_ids for g in batch.groups for r in g.rollouts})
        return batch

    with mock.patch.object(other.source, "next_batch", take_batch):
        run_training_loop(other)
    assert other.state.step == STEPS and not other.source.groups
    assert {*kept} <= {*found}
    assert all(found[seed][: len(ids)] == ids for seed, ids in kept.items())


@pytest.mark.parametrize("word", ["generation.overlap=none", "train.prompts_per_step=1"])
def test_a_checkpoint_with_groups_under_way_needs_what_they_were_begun_with(
    stopped: tuple[Run, Path], word: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resumed(*stopped, word)
    assert_refused(refused, 2, word.partition("=")[0])


@pytest.mark.slow  # three attempts, and four steps computed again
def test_a_run_stopped_anywhere_trains_on_what_it_has_and_equals_its_record(
    tmp_path: Path,
) -> None:
    draw, stops = random.Random(5), 0
    words = (*RECORDED, "eval.at_start=false")
    with cutting():
        while not attempt(
            tmp_path, *words, digits=digits, stop_at=draw.randrange(60, 120) if stops < 3 else None
        ):
            stops += 1
    run = tmp_path / "smoke"
    assert stops and not temporaries(run)
    audit = audit_ledger(run)
    assert audit.fates == {"trained": 4 * 4} and not audit.pending
    for step in range(1, 5):
        assert all(0 <= lag <= MAX_LAG for row in lags(run, step) for lag in row)
    check_replays(run)


def test_a_sampler_with_other_weights_stops_the_run_within_a_step(tmp_path: Path) -> None:
    with cutting():
        run = carrying(tmp_path, f"max_steps={STEPS}")
        replica, inner = run.generator, run.generator.load
        loads: list[int] = []

        def load(policy: Any, version: int) -> None:
            loads.append(version)
            if len(loads) < 2:  # the second update does not reach the sampler, which says it did
                inner(policy, version)
            replica.inner.load(policy, version)  # type: ignore[attr-defined]

        with mock.patch.object(replica, "load", load), pytest.raises(GenerationError) as raised:
            run_training_loop(run)
    assert "had other weights" in str(raised.value)
    assert run.state.updates == 1 and run.state.step == 1


def test_tokens_under_way_are_held_to_the_weights_as_they_are(tmp_path: Path) -> None:
    with cutting():
        run = carrying(tmp_path, "max_steps=3")
        sampler: Any = run.source
        check_weights, found = sampler.check_weights, list[str]()

        def check_both(policy: Any) -> None:
            check_weights(policy)  # they are the sampler's
            head = policy.model.get_output_embeddings().weight
            kept = head.detach().clone()
            with torch.no_grad():
                head.mul_(3.0)
            try:
                check_weights(policy)
            except GenerationError as error:
                found.append(str(error))
            with torch.no_grad():
                head.copy_(kept)

        with mock.patch.object(sampler, "check_weights", check_both):
            run_training_loop(run)
    assert found and all("had other weights" in f for f in found)


def test_flat_groups_are_replaced_and_told(tmp_path: Path) -> None:
    def some(completion_ids: Any, **_: Any) -> list[float]:
        """Every third group is flat, by its first completion's length."""
        whole = digits(completion_ids)
        groups = [whole[i : i + 4] for i in range(0, len(whole), 4)]
        flat = [len(completion_ids[4 * i]) % 3 == 0 for i in range(len(groups))]
        return [0.0 if f else x for f, group in zip(flat, groups, strict=True) for x in group]

    words = ("algorithm.zero_std_groups=resample", f"max_steps={STEPS}", "logging.rollouts_every=1")
    with cutting():
        run = carrying(tmp_path, *words, rewards={"some": some})
        run_training_loop(run)
    audit = audit_ledger(run.folder)
    assert audit.fates["trained"] + audit.fates["dropped"] == 4 * STEPS
    assert audit.fates["resampled"] > 0
    for step in range(1, STEPS + 1):
        assert all(0 <= lag <= MAX_LAG for row in lags(run.folder, step) for lag in row)
    assert isinstance(run.source, CarrySampler)
    pending = [group.group.prompt_offset for group in run.source.groups]
    assert len(audit.pending) == len(pending)


@pytest.mark.slow  # thirteen processes
def test_a_run_killed_anywhere_goes_on_and_equals_its_record(forked: Forked) -> None:
    words = ("train", "+recipe=smoke", "max_steps=4", "checkpoint.every=1", "eval.max_samples=2",
             "eval.at_start=false", "checkpoint.keep_last=9", *RECORDED[:-1])  # fmt: skip
    for fault in ("gen.chunk@40", "gen.request@3", "step@2", "step@3", "ckpt.rename@2", "reward@2"):
        root = f"root={fault}"
        assert forked(*words, root, faults=f"{fault}=kill9") == 6, forked.said()
        assert forked(*words, root, "resume=auto") == 0, forked.said()
        folder = forked.folder / fault / "smoke"
        audit = audit_ledger(folder)
        assert audit.fates == {"trained": 4 * 4} and not audit.pending, fault
        check_replays(folder)
