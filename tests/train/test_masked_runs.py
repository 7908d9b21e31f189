"""Runs with top_p, top_k and sampling masks: exact, corrected, recorded, replayed, carried over."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from carry_cases import carrying, cutting
from loop_cases import ENDS, cache, checked, sampled, step, updated
from loop_cases import alone as make
from replay_cases import last_line, recorded_run
from resume_cases import attempt, tensors

from rloo_cli.algorithms.common.rules import algorithm_warnings
from rloo_cli.checkpoint.step_state import dump_step, load_step
from rloo_cli.config import idle_keys
from rloo_cli.config.check import config_hash, dump_config
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.data.rollout_record import read_rollout_record
from rloo_cli.inspection.step_replay import replay_step
from rloo_cli.run import StepProgress
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import ConfigError, GenerationError

pytestmark = pytest.mark.wide

MASKED = ("generation.top_p=0.5", "generation.return_sampling_mask=true")
CORRECTED = ("algorithm.correction.mode=truncate", ENDS)


@pytest.fixture(scope="module", autouse=True)
def models() -> Iterator[None]:
    with mock.patch.dict(os.environ, RLOO_CACHE=cache()):
        yield


def test_top_p_and_a_correction_go_together_and_its_weights_are_one(tmp_path: Path) -> None:
    run = make(tmp_path, *MASKED, *CORRECTED, "algorithm.beta=0.1")
    run.generator.load(run.policy, run.state.updates)
    _, row, batch = step(run)
    for name in ("mean", "min", "max"):
        assert row[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(1.0, abs=1e-4)
    assert row["sampling/logp_diff_max"] < 1e-4
    masks = [r.sampling_mask for g in batch.groups for r in g.rollouts]
    counts = [n for mask in masks if mask is not None for n in mask.counts]
    assert len(masks) == 16 and all(masks)
    assert row["sampling/mask_ids/mean"] == pytest.approx(sum(counts) / len(counts))
    assert row["sampling/mask_ids/max"] == max(counts)
    assert row["sampling/mask_bytes"] == pytest.approx(4 * (sum(counts) / len(counts) + 1))
    # The entropy is that of the distribution that was sampled from, which has so many ids.
    assert 0 < row["entropy"] < torch.tensor(counts).double().log().mean() + 1e-3


def test_without_masks_top_p_and_a_correction_are_refused_and_masks_are_named() -> None:
    with pytest.raises(ConfigError, match=r"generation\.return_sampling_mask=true") as caught:
        checked((), (MASKED[0], *CORRECTED))
    assert caught.value.code == 2
    with pytest.raises(ConfigError) as caught:  # a penalty is not made exact by masks
        checked((), (*MASKED, *CORRECTED, "generation.repetition_penalty=1.2"))
    said = str(caught.value)
    assert "repetition_penalty=1.2" in said and "top_p" not in said
    assert "return_sampling_mask=true" not in said


@pytest.mark.parametrize(
    "word",
    ["min_p=0.1", "top_k=5", "min_tokens=3", "kwargs={typical_p:0.9}",
     "kwargs={suppress_tokens:[3]}"],
)  # fmt: skip
def test_masks_make_whatever_only_forbids_ids_exact(word: str) -> None:
    checked((), (*MASKED, *CORRECTED, f"generation.{word}"))


@pytest.mark.parametrize("word", ["kwargs={sequence_bias:[[[3],1.0]]}", "repetition_penalty=1.1"])
def test_what_makes_ids_likelier_is_refused_with_masks_too(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        checked((), (*MASKED, *CORRECTED, f"generation.{word}"))


def test_a_top_k_above_the_limit_is_refused_before_anything_loads() -> None:
    words = (*MASKED, "generation.top_k=50", "generation.max_sampling_mask_ids=20")
    with pytest.raises(ConfigError, match=r"generation\.top_k=20, or generation\.max_") as caught:
        checked((), words)
    assert caught.value.code == 2
    checked((), (*words[:2], "generation.top_k=20", words[3]))


def test_top_p_without_masks_is_warned_of_and_with_them_it_is_not() -> None:
    said = "logp then differs from the sampling distribution"
    assert any(said in line for line in algorithm_warnings(checked((), MASKED[:1])))
    assert not any(said in line for line in algorithm_warnings(checked((), MASKED)))


def test_keys_of_masks_that_do_nothing_are_told() -> None:
    def reasons(key: str, *words: str) -> list[str]:
        run = checked((), words)
        return idle_keys.idle_notes([f"generation.{key}"], type(run), dump_config(run))

    assert reasons("return_sampling_mask", MASKED[1]) and not reasons(
        "return_sampling_mask", *MASKED
    )
    assert reasons("max_sampling_mask_ids") and not reasons("max_sampling_mask_ids", *MASKED)


def test_the_limit_is_no_part_of_the_experiments_name_and_masks_are() -> None:
    plain, masked = checked((), MASKED[:1]), checked((), MASKED)
    raised = checked((), (*MASKED, "generation.max_sampling_mask_ids=2000"))
    assert config_hash(raised) == config_hash(masked) != config_hash(plain)


def test_a_sampler_with_other_weights_is_found_although_top_p_is_on(tmp_path: Path) -> None:
    run = make(tmp_path, *MASKED, ENDS)
    run.generator.load(run.policy, run.state.updates)
    batch = sampled(run)
    for rollout in (r for group in batch.groups for r in group.rollouts):
        rollout.behaviour_logp = [x + 0.1 for x in rollout.behaviour_logp or []]
    with pytest.raises(GenerationError, match=r"differ by 0\.1"):
        updated(run, batch)


def test_a_checkpoint_within_a_step_gives_every_rollout_back_with_its_mask(tmp_path: Path) -> None:
    run = make(tmp_path, *MASKED, ENDS)
    run.generator.load(run.policy, run.state.updates)
    batch = sampled(run)
    again = load_step(*dump_step(StepProgress(batch)), run.prompts).batch
    assert [g.rollouts for g in again.groups] == [g.rollouts for g in batch.groups]
    assert all(r.sampling_mask for g in again.groups for r in g.rollouts)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four recorded steps with masks and a KL in the rewards."""
    return recorded_run(tmp_path_factory.mktemp("recorded"), *MASKED)


def test_a_recorded_step_with_masks_comes_out_bit_for_bit(recorded: Path) -> None:
    for number in (1, 4):
        found = replay_step(recorded, number)
        assert not found.found and not found.tolerance, found.to_json()
    assert last_line(recorded)["sampling/logp_diff_max"] < 1e-4
    record = read_rollout_record(recorded, 4)
    assert record.head["sampling_mask"] is True


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_an_undisturbed_one(recorded: Path, tmp_path: Path) -> None:
    looks: list[int] = []
    words = (*MASKED, "logging.rollouts_every=1", "data.eval_split=null", "checkpoint.every=2")
    assert attempt(tmp_path / "whole", *words, looks=looks)
    at = len(looks) * 5 // 8
    assert not attempt(tmp_path / "cut", *words, stop_at=at)
    assert attempt(tmp_path / "cut", *words)
    cut, whole = (tmp_path / name / "smoke" for name in ("cut", "whole"))
    ours, theirs = (tensors(f / "final" / "model.safetensors") for f in (cut, whole))
    assert ours == theirs


def test_carried_completions_have_the_masks_of_every_version_that_sampled_them(
    tmp_path: Path,
) -> None:
    words = (*MASKED, "max_steps=4", "logging.rollouts_every=1")
    with cutting():
        run = carrying(tmp_path, *words, noise=0.0)
        run_training_loop(run)
    spans = 0
    for number in range(1, 5):
        groups = read_rollout_record(run.folder, number).batch.groups
        rollouts = [r for group in groups for r in group.rollouts]
        assert all(len(r.sampling_mask or ()) == r.length for r in rollouts)
        spans += sum(len(r.version_spans or []) > 1 for r in rollouts)
        batch = run.policy.pack(groups, whole_group_slices(groups, range(len(groups))))
        assert batch.kept is not None
    assert spans  # completions that two versions of the weights sampled
    rows = [row for row in run.log.metrics_lines if "sampling/logp_diff_lag0" in row]
    assert rows and all(row["sampling/logp_diff_lag0"] < 1e-4 for row in rows)
