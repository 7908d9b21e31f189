"""The TL;DR pipeline in miniature: its posts, its hidden rule, and the recipe from nothing."""

import random
import re
import shutil
from pathlib import Path

import pytest
from cli_cases import Rloo, strict, surroundings
from safetensors.torch import load_file

from rloo_cli.config import check, synthetic
from rloo_cli.config.compose import compose_config
from rloo_cli.data.synthetic import tldr
from rloo_cli.data.synthetic import tldr_models as trained
from rloo_cli.data.synthetic import tldr_posts as posts
from rloo_cli.data.synthetic.tldr_posts import Facts, score_summary

FACTS = Facts("boss", "stole", "bike", "monday", "jealous", "quit")
POST = (
    "POST : i saw my uncle last friday . on monday my boss stole my bike . they say they were "
    "jealous . my aunt has a lamp . i plan to quit .\nTL;DR :\n"
)
WHOLE = "my boss stole my bike on monday , they were jealous , i want to quit ."


# The posts.


@pytest.mark.wide
@pytest.mark.wide
def test_posts_are_the_same_everywhere() -> None:
    assert tldr.tldr_examples("test")[0] == {
        "prompt": "POST : my cousin has a ring . i think they were greedy . my sister scratched my "
        "boat on tuesday . i saw my father last thursday . now i want to forgive .\nTL;DR :\n",
        "summary": "my sister scratched my boat .",
    }
    assert tldr.tldr_examples("train")[:50] == [tldr._tldr_example("train", i) for i in range(50)]


def test_no_post_that_is_held_out_is_trained_on() -> None:
    facts = {
        split: {posts.parse_post(r["prompt"]) for r in tldr.tldr_examples(split)}
        for split in tldr.SIZES
    }
    assert not facts["test"] & facts["train"] and not facts["validation"] & facts["train"]
    assert not facts["validation"] & facts["test"]
    assert len(facts["test"]) > 990  # hardly one is told twice


def test_a_post_tells_its_facts_and_no_aside_has_them() -> None:
    for number in range(300):
        dice = random.Random(number)
        facts = posts.sample_facts(dice)
        text = posts.write_post(facts, dice)
        assert posts.parse_post(text) == facts and posts.is_post(text)
        for word in vars(facts).values():
            assert text.split().count(word) == 1
    with pytest.raises(ValueError, match="not a post"):
        posts.parse_post("What is 2 + 2?")


def test_every_word_has_a_token_and_comes_back() -> None:
    tokens = tldr.tldr_tokenizer()
    for row in [tldr._tldr_example(split, i) for split in tldr.SIZES for i in range(300)]:
        ids = tokens(row["prompt"])["input_ids"]
        said = tokens(row["summary"])["input_ids"]
        assert tokens.unk_token_id not in ids + said
        assert len(ids) <= 80 and len(said) < trained.MAX_SAMPLE_TOKENS
        assert (
            tokens.decode([*said, tokens.eos_token_id], skip_special_tokens=True)
            == (row["summary"])
        )
        # A reward model reads both in one text: no word melts into its neighbour.
        assert tokens(row["prompt"] + row["summary"])["input_ids"] == ids + said


# The hidden rule.


@pytest.mark.parametrize(
    ("summary", "score"),
    [
        (WHOLE, 6),
        ("my boss stole my bike .", 3),
        ("someone stole my stuff .", 1),
        ("i want to quit .", 1),
        ("my uncle stole my bike .", 1),  # another person: -1
        ("my boss stole my lamp on friday .", 0),
        ("boss stole my bike .", 1),  # out of its phrase; who acts still stands there
        ("my boss stole my bike , my boss stole my bike .", 1.5),  # three words said again
        (WHOLE.removesuffix(" ."), 5),
        (WHOLE + " so so .", 6),  # 20 words
        (WHOLE + " so so so .", 5.9),
        ("", -1),
        (".", 0),
    ],
)
def test_the_hidden_rule(summary: str, score: float) -> None:
    assert posts.parse_post(POST) == FACTS
    assert score_summary(POST, summary) == pytest.approx(score)


def test_the_hidden_rule_as_a_reward_says_nothing_of_other_prompts() -> None:
    said = tldr.gold_score(prompts=[POST, "2 + 2 =", [{"role": "user"}]], completions=[WHOLE] * 3)
    assert said == [6, None, None]


def test_careless_people_leave_out_and_mistake_some_facts() -> None:
    scores = [score_summary(r["prompt"], r["summary"]) for r in tldr.tldr_examples("test")]
    assert 3 < sum(scores) / len(scores) < 4 and max(scores) == 6 and min(scores) < 1


def test_preferences_are_right_more_often_the_clearer_the_case() -> None:
    dice = random.Random(0)
    rate = {}
    for worse in ("my boss stole my bike on monday .", "my uncle lost my lamp ."):
        judged = [trained._preferred_pair(POST, worse, WHOLE, dice)["chosen"] for _ in range(300)]
        rate[worse] = judged.count(WHOLE) / 300
    two, nine = rate.values()  # points apart: sigmoid(2) = 0.88, sigmoid(9) = 0.9999
    assert 0.8 < two < 0.95 < nine


# The recipe.


def test_the_hidden_rule_is_no_reward_of_the_recipe() -> None:
    run = check.check_config(compose_config(["+recipe=tldr_mini"]))
    assert run.rewards["tldr_mini_gold"].weight == 0 and run.rewards["tldr_mini_rm"].weight == 1
    assert {path for path in synthetic.SYNTHETIC_MODELS if "tldr" in path} == {
        "tldr_base",
        "tldr_sft",
        "tldr_reward",
    }


@pytest.mark.parametrize("section", ["sft", "reward_model"])
def test_what_is_made_is_trained_as_the_recipe_says(section: str) -> None:
    run = check.check_config(compose_config(["+recipe=tldr_mini"]))
    assert trained.tldr_recipe(section) == (getattr(run, section), run.seed)


def test_the_shape_of_the_made_models_is_what_is_checked_before_they_are_made() -> None:
    names = [name for name in synthetic.SYNTHETIC_CONTEXT_LENGTHS if name.startswith("tldr")]
    assert {synthetic.SYNTHETIC_CONTEXT_LENGTHS[name] for name in names} == {
        tldr.SHAPE["max_position_embeddings"]
    }


@pytest.mark.slow
def test_the_whole_pipeline_from_nothing(tmp_path: Path) -> None:
    rloo = Rloo(tmp_path, surroundings(tmp_path))
    ended = rloo("train", "+recipe=tldr_mini", "logging.samples=0", timeout=1500)
    assert ended.code == 0 and not ended.own_err, ended.said
    rows = strict(tmp_path / "runs" / "tldr_mini" / "metrics.jsonl")
    held_out = [row for row in rows if "eval_reward" in row]
    first, last = held_out[0], held_out[-1]
    assert last["eval_reward"] > first["eval_reward"] + 0.5
    assert last["eval_reward/tldr_mini_gold/mean"] > first["eval_reward/tldr_mini_gold/mean"] + 1
    assert max(row.get("objective/kl", 0) for row in rows) < 20
    # By hand, by TRL's trainers: in the same order, models that learned as much.
    for verb, folder in (("sft", "sft"), ("reward-model", "reward_model")):
        ended = rloo(verb, "+recipe=tldr_mini", timeout=600)
        assert ended.code == 0, ended.said
        name = {"sft": "tldr_sft-*", "reward_model": "tldr_reward-*"}[folder]
        (kept,) = (tmp_path / "cache").glob(name)
        by_hand = load_file(tmp_path / "runs" / folder / "tldr_mini" / "model.safetensors")
        made = load_file(kept / "model.safetensors")
        assert {n: t.shape for n, t in by_hand.items()} == {n: t.shape for n, t in made.items()}
    assert re.search(r"held-out accuracy +0\.\d+ -> 0\.[67]", ended.out)
    shutil.rmtree(tmp_path / "runs")
