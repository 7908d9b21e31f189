"""Whole runs of PPO: they go on bit for bit, on ranks too; what they save; what is refused."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import strict
from fork_cases import Forked
from hook_calls import ppo
from loop_cases import alone as make
from loop_cases import checked, sampled, updated
from plan_cases import case
from resume_cases import attempt, differing, left, temporaries, untimed, update_apart
from safetensors.torch import load_file, save_file

from rloo_cli.checkpoint import manifest, save, step_state
from rloo_cli.config import check, synthetic, value_model
from rloo_cli.config.compose import compose_config
from rloo_cli.planning import model_spec, peak_memory, plan, static_memory
from rloo_cli.planning import text as planning_text
from rloo_cli.policy import memory
from rloo_cli.run import Run, StepProgress
from rloo_cli.train.step import update_policy
from rloo_cli.utils.errors import ConfigError, StorageError

pytestmark = pytest.mark.wide

# Every quarter of the byte tokens ends a completion: lengths and ways of ending differ.
ENDS = f"generation.stop_token_ids={[*range(10, 258, 16)]}".replace(" ", "")
PPO = ("algorithm=ppo", "train.learning_rate=0.01", ENDS, "eval.at_start=false")
RM = ("reward=model", "reward.model.path=make:tiny_reward")


def moody(completion_ids: Any, **_: Any) -> list[float | None]:
    """A score that draws from the global generator, and sometimes says nothing."""
    drawn = float(torch.rand(()))
    return [None if ids[0] % 7 == 0 else drawn + len(set(ids)) % 5 for ids in completion_ids]


@pytest.mark.slow_but("8")
@pytest.mark.parametrize("stops", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been(stops: int, tmp_path: Path) -> None:
    keys = (*PPO, "algorithm.num_minibatches=2", "max_steps=2", "checkpoint.every=1")
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *keys, looks=looks, moody=moody)
    whole = left(tmp_path / "whole" / "smoke")
    assert "value.safetensors" in whole and len(looks) > 60
    draw = random.Random(stops)
    run, places = tmp_path / "cut" / "smoke", list[Any]()
    begin = [22, 4]  # within the first step, an update on, and then anywhere
    for point in [*begin, *(draw.randrange(1, len(looks) // 2) for _ in range(stops)), None]:
        ended = attempt(tmp_path / "cut", *keys, stop_at=point, moody=moody)
        places.append(manifest.checkpoint_position(manifest.list_checkpoints(run)[0]))
    assert places[0][0] == 0 < places[0][1] < places[1][1] < 8  # of 8 updates a step
    assert ended and not differing(whole, left(run)) and not temporaries(run)
    assert manifest.newest_checkpoint(run)[1] == []  # no checkpoint was passed over


class Enough(Exception):
    pass


def test_between_two_updates_of_a_step_everything_is_kept(tmp_path: Path) -> None:
    """Values, advantages and returns are those of the step's beginning, whatever was learned."""
    words = ("algorithm=ppo", "algorithm.num_iterations=3", "train.learning_rate=0.01", ENDS)
    whole = make(tmp_path, *words, *RM, rewards={})
    batch = sampled(whole)
    seen: list[dict[str, torch.Tensor]] = []
    real = step_state.dump_step

    def watch(run: Run) -> None:
        tensors, _ = real(StepProgress(batch, prepared=True))
        seen.append({n: t.clone() for n, t in tensors.items() if n.startswith("column/")})

    step = whole.optimizer.step

    def stepped(norm: torch.Tensor) -> None:
        watch(whole)
        step(norm)

    whole.optimizer.step = stepped  # type: ignore[method-assign]
    update_policy(whole, StepProgress(batch))
    assert len(seen) == 3
    for name in ("value", "advantage", "returns", "old_logp"):
        assert all(torch.equal(one[f"column/{name}"], seen[0][f"column/{name}"]) for one in seen)


def test_what_a_checkpoint_has_and_a_final_model_has_not(tmp_path: Path) -> None:
    assert attempt(tmp_path, *PPO, *RM, "max_steps=1", "algorithm.num_iterations=1")
    run = tmp_path / "smoke"
    newest = manifest.list_checkpoints(run)[0]
    value = load_file(newest / "trainer" / "value.safetensors")
    assert value["score.weight"].shape == (1, 64)
    moments = load_file(newest / "trainer" / "optimizer-1-of-1.safetensors")
    assert {f"exp_avg/value.{name}" for name in value} <= set(moments)
    assert not [n for n in load_file(run / "final" / "model.safetensors") if "score" in n]
    assert not (run / "final" / "trainer").exists()


def test_a_value_model_that_was_not_written_whole_is_no_checkpoint(tmp_path: Path) -> None:
    run = make(tmp_path, "algorithm=ppo")
    assert run.value_model is not None
    save.export.write_model_folder(run.policy.model, run.tokenizer, tmp_path)
    (tmp_path / "trainer").mkdir()
    file, whole = tmp_path / "trainer" / "value.safetensors", run.value_model.state()
    save_file(whole, file)
    save._check_written_weights(run, tmp_path)
    for lame in (
        {n: t for n, t in whole.items() if "layers.1" not in n},
        whole | {"score.weight": torch.zeros(0)},
    ):
        save_file(lame, file)
        with pytest.raises(StorageError, match="value"):
            save._check_written_weights(run, tmp_path)
    missing = save.estimated_checkpoint_bytes(run)
    run.value_model = None
    assert missing > save.estimated_checkpoint_bytes(run)


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    plain = (ENDS, "eval.at_start=false", "max_steps=1")
    assert attempt(tmp_path, *plain)
    came = f"resume={manifest.list_checkpoints(tmp_path / 'smoke')[0]}"
    other = ("name=other", "max_steps=2", "algorithm=ppo", came, ENDS, "eval.at_start=false")
    with pytest.raises(ConfigError, match="algorithm"):
        attempt(tmp_path, *other)
    with pytest.raises(ConfigError, match=r"value\.safetensors"):
        attempt(tmp_path, *other, "resume_allow_changes=true")


# Ranks.

RANKS = (
    "train", "+recipe=smoke", "algorithm=ppo", "distributed.threads=1", "logging.console=plain",
    "train.prompts_per_step=5", "train.micro_batch_tokens=120", "max_steps=2", "eval.every=0",
    "eval.at_start=false", "train.learning_rate=1e-3", "train.lr_scheduler=constant",
    "train.max_grad_norm=null", "train.optimizer=torch.optim:SGD", "root=runs", ENDS, *RM,
    "algorithm.mask_truncated_completions=true",
)  # fmt: skip


@pytest.mark.slow
def test_two_ranks_make_the_update_of_one_process(fast: dict[str, str], tmp_path: Path) -> None:
    home = Forked(fast, tmp_path)
    assert home(*RANKS, "name=one") == 0, home.said()
    spread = ("distributed=ddp", "distributed.num_processes=2", "name=two")
    assert home(*RANKS, *spread, ranks=2) == 0, home.said()
    one, two = (tmp_path / "runs" / name for name in ("one", "two"))
    assert update_apart(one, two) < 1e-4
    found = [manifest.list_checkpoints(r)[0] / "trainer" / "value.safetensors" for r in (one, two)]
    ours, theirs = map(load_file, found)
    begin = load_file(Path(synthetic.resolve_model_path("make:tiny_reward")) / "model.safetensors")
    for name, tensor in ours.items():
        moved = (tensor - begin[name]).norm()
        assert float((tensor - theirs[name]).norm()) <= 1e-4 * float(moved), name
        assert moved > 0 or "embed" in name, name
    for a, b in zip(strict(one / "metrics.jsonl"), strict(two / "metrics.jsonl"), strict=True):
        assert {*untimed(a)} == {*untimed(b)}
        for name in ("loss/value_avg", "val/clipfrac_avg", "value/explained_variance", "loss"):
            if name in a:
                assert b[name] == pytest.approx(a[name], rel=2e-4, abs=1e-5), name


# What is refused, before torch.

REFUSED = {  # all at once: the key that is wrong, and the way out
    "algorithm.baseline=loo": "algorithm.baseline=value",
    "algorithm.kl_credit=sequence": "algorithm.kl_credit=to_go",
    "algorithm.normalize_advantages=true": "algorithm.normalize_advantages=false",
    "algorithm.advantage_scale=batch": "algorithm.advantage_scale=none",
    "algorithm.kl_in_baseline=true": "algorithm.kl_in_baseline=false",
    "algorithm.ratio_level=geometric": "algorithm.ratio_level=token",
    "algorithm.zero_std_groups=drop": "algorithm.zero_std_groups=keep",
}


def refused(*words: str) -> list[Any]:
    """The problems of a config."""
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(["+recipe=smoke", "algorithm=ppo", *words]))
    return caught.value.problems


def test_what_ppo_cannot_do_is_refused_with_the_way_out() -> None:
    found = [p.fix for p in refused(*REFUSED)]
    assert [fix for fix in REFUSED.values() if fix not in found] == []
    assert any("does not exist" in p.what for p in refused("model.value.path=./nowhere"))
    assert len(refused("algorithm.gamma=1.5", "algorithm.vf_coef=-1.0")) == 2


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_ppo_goes_with_every_engine_and_with_an_adapter(engine: str) -> None:
    words = ["+recipe=smoke", "algorithm=ppo", "lora=default", f"distributed={engine}"]
    assert check.check_config(compose_config(words)).distributed.engine == engine


def test_no_other_algorithm_has_a_value_as_its_baseline() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.baseline=loo"):
        check.check_config(compose_config(["+recipe=smoke", "algorithm.baseline=value"]))


def test_several_completions_of_a_prompt_may_be_resampled() -> None:
    words = ["algorithm=ppo", "algorithm.zero_std_groups=resample", "algorithm.num_generations=2"]
    assert check.check_config(compose_config(["+recipe=smoke", *words])).algorithm.name == "ppo"


# Where it begins, by config.json alone.

SAME = {"model_type": "llama", "vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(("theirs", "alike", "reward", "why"), [
    (SAME, True, "model", "the one reward model"),
    (SAME, False, None, "another vocabulary"),
    (SAME | {"vocab_size": 10}, True, None, "differs in vocab_size"),
    (SAME | {"model_type": "qwen2", "hidden_size": 8}, True, None, "model_type, hidden_size"),
    ({"text_config": SAME}, True, "model", "the one reward model"),
])  # fmt: skip
def test_a_reward_model_is_the_beginning_only_where_backbone_and_words_are_the_policys(
    theirs: Any, alike: bool, reward: Any, why: str
) -> None:
    run = checked((), ("algorithm=ppo", *RM))
    values = {run.model.path: SAME, "make:tiny_reward": theirs}
    found = value_model.choose_value_init(
        run.model, run.rewards, lambda path, _: values[path], alike
    )
    assert (found.reward, found.path) == (reward, "make:tiny_reward" if reward else "make:tiny")
    assert why in found.why


# Memory and time: the fourth model is counted.


def test_a_plan_counts_the_value_model() -> None:
    model = model_spec.parse_model_spec({**_small(), "model_type": "llama"}, "small", "the test")
    three = case("algorithm=ppo", ranks=2)
    four = case("algorithm=ppo", ranks=2, value_model=model)
    count = model.total_params - model.head_params + model.sizes.hidden
    assert (
        static_memory.value_model_params(four) == count
        and static_memory.value_model_params(three) == 0
    )
    one, two = (
        static_memory.estimate_static_memory(three),
        static_memory.estimate_static_memory(four),
    )
    assert two.value_model == 2 * count
    assert two.optimizer - one.optimizer == pytest.approx(12 * count)
    assert two.gradients - one.gradients == pytest.approx(4 * count)
    assert peak_memory.estimate_peak_memory(four).phases["update"]["value model"] == 2 * count
    assert plan.checkpoint_size(four) - plan.checkpoint_size(three) == pytest.approx(14 * count)


def _small() -> dict[str, Any]:
    from plan_cases import SMALL

    return SMALL


def test_the_plan_of_the_tldr_recipe_names_four_models() -> None:
    from rloo_cli.planning import device

    found = plan.make_run_plan(
        check.check_config(compose_config(["+recipe=tldr_1b_ppo"])),
        device.find_device("80GiB"),
        plan.PlanOptions(gpus=8),
    )
    text = planning_text.plan_text(found)
    assert "value model of 908.8 M" in text and "EleutherAI_pythia-1b" in text
    assert {"reference", "value model", "reward models"} <= set(found.memory.phases["update"])
    assert found.steps == 1954 and found.fits
    settings = found.inputs.run.algorithm
    assert isinstance(settings, ppo.Config)
    assert (settings.num_iterations, settings.beta, settings.lam) == (4, 0.05, 0.95)


def test_rows_of_a_forward_leave_room_for_the_value_model(tmp_path: Path, monkeypatch: Any) -> None:
    run = make(tmp_path, "algorithm=ppo", "model.gradient_checkpointing=false")
    assert run.value_model is not None
    monkeypatch.setattr(memory, "_device_memory_bytes", lambda device: 20e6)
    generation = run.config.generation
    without = memory._free_bytes(run.policy, generation, True)
    beside = memory._free_bytes(
        run.policy, run.config.generation, True, value_model=run.value_model
    )
    count = sum(p.numel() for p in run.value_model.model.parameters())
    assert without - beside == 16 * count  # weights, gradients, two moments
    given = run.policy, run.config.model, run.config.train, generation
    narrow = memory.measure_forward_limits(*given, 50, True).tokens
    run.value_model.tokens_per_policy_token = (
        50.0  # of a layout that takes many more rows than the policy's
    )
    assert (
        memory.measure_forward_limits(*given, 50, True, value_model=run.value_model).tokens < narrow
    )


def test_activations_of_both_models_are_recomputed(tmp_path: Path) -> None:
    run = make(tmp_path, "algorithm=ppo", "model.gradient_checkpointing=true", ENDS)
    assert run.value_model is not None and run.value_model.model.is_gradient_checkpointing
    batch = sampled(run)
    other = make(tmp_path, "algorithm=ppo", ENDS)
    same = updated(other, sampled(other))
    assert updated(run, batch).to_metrics()["loss"] == pytest.approx(
        same.to_metrics()["loss"], rel=1e-5
    )
