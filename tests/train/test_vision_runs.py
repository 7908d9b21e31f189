"""Whole runs with images in their prompts: they go on bit for bit, and say what they cannot do."""

import json
from types import SimpleNamespace

import pytest
import torch
import vision_cases as v
from assert_refused import assert_refused
from loop_cases import ENDS, PLAIN, apart, checked, digits, flat, gradient, make, sampled, step
from resume_cases import attempt, differing, left

from rloo_cli.data import image_rules, segments
from rloo_cli.data.batch import Rollout
from rloo_cli.policy.model import PlainSequence
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.wide

SHORT = ("generation.max_completion_length=6", "algorithm.num_generations=2", ENDS)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return v.rows_file(tmp_path_factory.mktemp("rows"))


def words_of(file, name="qwen2_5_vl", *more):
    return (*v.run_words(name, file), *SHORT, *more)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit_with_its_images(tmp_path, file):
    words = words_of(file, "qwen2_5_vl", "algorithm.num_minibatches=2", "max_steps=2")
    looks = []
    assert attempt(tmp_path / "straight", *words, looks=looks, digits=digits)
    stops = 0
    for at in (len(looks) // 3, len(looks) // 2):  # within the first step, and within the second
        stops += not attempt(tmp_path / "cut", *words, stop_at=at, digits=digits)
    assert stops == 2 and attempt(tmp_path / "cut", *words, digits=digits)
    (one,), (other,) = ([*(tmp_path / n).iterdir()] for n in ("straight", "cut"))
    assert differing(left(one), left(other)) == []


@pytest.mark.parametrize("budget", ["null", "{at: 2, text: ab, tokens: 2}"])
def test_the_update_of_packed_rows_is_that_of_rows_computed_one_by_one(tmp_path, file, budget):
    words = (*PLAIN, "train.learning_rate=1.0", "algorithm.beta=0", *words_of(file))
    words += (f"generation.answer_budget={budget}",)
    run = make(tmp_path, *words, noise=0.0)
    assert run.layout_choice.layout == "shared"
    batch, total = sampled(run), torch.zeros(())
    score = batch.raw[0]
    advantage = (score - score.mean(1, keepdim=True)) * 2
    for p, group in enumerate(batch.groups):
        for k, rollout in enumerate(group.rollouts):
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            whole = ids if group.media is None else PlainSequence(ids, group.media)
            with native_attention(run.policy.model):
                logits = run.policy.call(whole, (), False)[0, len(group.prompt_ids) - 1 : -1]
            logp = segments.target_logprobs(logits, torch.tensor(rollout.completion_ids), 1.0)
            own = torch.tensor(rollout.mask or [1] * len(logp))
            total = total - advantage[p, k].float() * (own * logp).sum()
    expected = gradient(run, total / score.numel())
    moved, line, _ = step(run, batch)
    assert apart(-moved, expected) < 1e-4
    assert (budget == "null") or line["completions/answer_forced_share"] > 0.2


def test_a_frozen_tower_keeps_its_weights_while_the_rest_learns(tmp_path, file):
    run = make(tmp_path, *words_of(file), "model.freeze=[vision]", noise=0.0)
    before = {n: w.clone() for n, w in run.policy.model.named_parameters()}
    step(run)
    moved = {n for n, w in run.policy.model.named_parameters() if not torch.equal(w, before[n])}
    assert moved and not any(".visual." in name for name in moved)


@pytest.mark.slow
def test_completions_of_overlapped_sampling_are_those_of_a_run_without(tmp_path, file):
    sampled = []
    for overlap in ("none", "ahead"):  # weights that stay: nothing else may differ
        still = ("train.learning_rate=0", "logging.samples=8", f"generation.overlap={overlap}")
        words = words_of(file, "qwen2_5_vl", *still)
        root = tmp_path / overlap
        assert attempt(root, *words, "max_steps=2", digits=digits)
        (found,) = root.iterdir()
        rows = [row for text in left(found)["samples"].values() for row in text.splitlines()]
        sampled.append([json.loads(row)["completion"] for row in rows])
    assert sampled[0] == sampled[1]


def test_a_reward_gets_the_images_of_its_prompt_under_the_columns_name(tmp_path, file):
    seen = []

    def look(images, completion_ids, **_):
        seen.extend(images)
        return [float(len(ids)) for ids in completion_ids]

    run = make(tmp_path, *words_of(file), rewards={"look": look})
    batch = sampled(run)
    counts = [0 if g.media is None else len(g.media.sources) for g in batch.groups]
    assert [len(images or []) for images in seen] == [n for n in counts for _ in range(2)]
    assert {image.mode for images in seen if images for image in images} == {"RGB"}


def test_equal_words_with_other_images_are_not_scored_from_the_cache(tmp_path):
    root = tmp_path / "rows"
    file = v.rows_file(root, (1, 1))
    first, second = map(json.loads, file.read_text().splitlines())
    second |= {"prompt": first["prompt"], "answer": first["answer"]}
    file.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    asked = []

    def look(images, completion_ids, **_):
        asked.extend(image[0].tobytes() for image in images)
        return [1.0] * len(completion_ids)

    words = words_of(file, "qwen2_5_vl", "reward.look.cache=true", "train.prompts_per_step=2")
    run = make(tmp_path, *words, rewards={"look": look})

    def generate(groups, seeds, arrived):
        for index, (group, own) in enumerate(zip(groups, seeds, strict=True)):
            group.rollouts = [Rollout([5, 6], "", "length", False, seed, 0) for seed in own]
            arrived(index)

    run.rollouts.generator = SimpleNamespace(generate=generate, metrics={}, samples_on_rank0=False)
    sampled(run)
    assert len(asked) == 4 and len({*asked}) == 2


REFUSED = {
    "vLLM without torchvision": (["generation=vllm_colocate"], "vllm_colocate"),
    "a value model": (["algorithm=ppo", "algorithm.num_generations=2"], "PPO"),
    "completions that are carried on": (
        ["generation.overlap=carry", "generation.allow_uncorrected=true"], "are carried over"
    ),
    "a teacher on a server": (
        ["algorithm=opd", "algorithm.teacher.base_url=http://127.0.0.1:9"], "is on a server"
    ),
    "a reference of text alone": (["model.ref_path=make:tiny"], "another kind of model"),
    "an agent of somebody else's": (
        ["agent=proxy", "agent.command=sh"], "does not support images"
    ),
}  # fmt: skip
NO_TOOL_IMAGES = {
    "a model of text": (["model.path=make:tiny"], "only text"),
    **{name: case for name, case in REFUSED.items() if name != "vLLM without torchvision"},
}


@pytest.mark.parametrize("extra, said", NO_TOOL_IMAGES.values(), ids=NO_TOOL_IMAGES)
def test_where_tools_may_not_answer_with_images_the_reason_is_known(extra, said):
    model = f"model.path={v.folder('qwen2_5_vl')}"
    assert said in str(image_rules.why_no_tool_images(checked((), (model, *extra))))
    assert image_rules.why_no_tool_images(checked((), (model,))) is None


@pytest.mark.slow_but("completions that are carried on", "an agent of somebody else's")
@pytest.mark.parametrize("extra, said", REFUSED.values(), ids=REFUSED)
def test_what_a_run_with_images_cannot_do_is_said_before_weights_load(
    tmp_path, file, monkeypatch, extra, said, sentence
):
    monkeypatch.setattr(image_rules, "WITHOUT_TORCHVISION", ())
    with pytest.raises(ConfigError) as refused:
        make(tmp_path, *words_of(file), *extra)
    assert_refused(refused, 2, said)
    sentence(refused)


def test_where_images_see_both_ways_vllm_without_a_gpu_is_refused(tmp_path, file, sentence):
    with pytest.raises(ConfigError) as refused:
        make(tmp_path, *words_of(file, "gemma3"), "generation=vllm_colocate")
    assert_refused(refused, 2, where="generation", fix="generation=transformers")
    sentence(refused)


def test_a_model_of_text_alone_is_refused_for_prompts_with_images(tmp_path, file, sentence):
    with pytest.raises(DataError) as refused:
        make(tmp_path, *words_of(file), "model.path=make:tiny")
    assert_refused(refused, 4, "make:tiny", where="model.path")
    sentence(refused)


def test_weights_move_with_every_layout_of_images(tmp_path, file):
    run = make(tmp_path, *words_of(file, "gemma3"), noise=0.0)
    before = flat(run)
    _, row, batch = step(run)
    assert run.layout_choice.layout == "packed" and float((flat(run) - before).norm()) > 0
    assert row["grad_norm"] > 0 and batch.score.shape == (4, 2)


def test_an_adapter_in_the_tower_is_refused_before_vllm_starts(tmp_path, file, monkeypatch):
    monkeypatch.setattr(image_rules, "WITHOUT_TORCHVISION", ("qwen2_5_vl",))
    with pytest.raises(ConfigError, match="also in the vision tower") as caught:
        make(tmp_path, *words_of(file), "generation=vllm_colocate", "lora=default")
    fix = "model.lora.target_modules=[k_proj,o_proj,q_proj,v_proj], or generation=transformers"
    assert fix in str(caught.value)
