"""The TL;DR pipeline in miniature, made here: posts, a supervised model, preferences, a reward
model. `recipes/tldr_mini.yaml` is the experiment, and says how the two models are trained.

    make:tldr         rows: prompt, summary (by careless people); train, validation, test
    make:tldr_base    a random model of 0.3 M parameters, one token per word
    make:tldr_sft     trained on the summaries, as `rloo sft +recipe=tldr_mini` does
    make:tldr_pairs   rows: prompt, chosen, rejected; two samples of make:tldr_sft, preferred by the
                      hidden rule as noisy people would; train, test
    make:tldr_reward  trained on the pairs, as `rloo reward-model +recipe=tldr_mini` does

Each is made on first use and kept in the cache. `gold_score` is the hidden rule as a reward
function, for judging: nothing is trained on it.
"""

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rloo_cli.config import registry
from rloo_cli.config.schema import RewardModelConfig, SftConfig
from rloo_cli.data.synthetic import tldr_posts as posts
from rloo_cli.data.synthetic.cache import kept
from rloo_cli.utils import paths

SIZES = {"train": 6000, "validation": 200, "test": 1000}
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,  # the smallest that vLLM has kernels for without a GPU
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # from the usual 0.02 so narrow a model does not learn to copy
}
SPECIAL = ["<pad>", "<eos>", "<unk>"]
PAIRS = {"train": 3000, "test": 300}
NOISE = 1.0  # points of the hidden rule: the preferred one wins with sigmoid(difference / NOISE)
LONGEST = 28  # tokens of a sample
SAMPLED_AT_ONCE = 256


def rows(split: str) -> list[dict[str, Any]]:
    """Posts with a careless person's summary. No two splits share a post's facts."""
    return [_row(split, i) for i in range(SIZES[split])]


def _row(split: str, number: int) -> dict[str, Any]:
    dice = random.Random(f"tldr/{split}/{number}")
    facts = posts.draw(dice)
    while _split_of(facts) != split:
        facts = posts.draw(dice)
    return {"prompt": posts.post(facts, dice), "summary": posts.reference(facts, dice)}


def _split_of(facts: posts.Facts) -> str:
    """Where a post with these facts belongs: eight in ten are for training."""
    digit = hashlib.sha256(str(facts).encode()).digest()[0] % 10
    return "test" if digit == 0 else "validation" if digit == 1 else "train"


def gold_score(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
    """The hidden rule (`tldr_posts.gold`) as a reward function: a judge, or a metric.

    None where the prompt is no post of make:tldr: the rule does not apply.
    """
    return [
        posts.gold(prompt, completion) if posts.is_post(prompt) else None
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    frames = (
        posts.HEAD,
        posts.END,
        *posts.EVENT,
        *posts.FEELING,
        *posts.WISH,
        *posts.ASIDES,
        *posts.CHAT,
        posts.GLUE,
    )
    words = {w for frame in frames for w in frame.split() if "{" not in w} | {*posts.CLASS_OF}
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(words)])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def base() -> Path:
    """The folder of the random model that everything begins with."""
    return kept("tldr_base", f"tldr_base-{SHAPE}-{sorted(tokenizer().get_vocab())}", _make_base)


def _make_base(folder: Path) -> None:
    tokens = tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokens), tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id, **SHAPE,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokens.save_pretrained(folder)


# What is trained: by the code of the verbs, with the values of the recipe.


def recipe(section: str) -> tuple[Any, int]:
    """`sft` or `reward_model` of recipes/tldr_mini.yaml over conf/config.yaml, and the seed.

    Read as plain YAML: this is also called where Hydra is at work.
    """
    common = yaml.safe_load((paths.CONF / "config.yaml").read_text())
    own = yaml.safe_load((paths.RECIPES / "tldr_mini.yaml").read_text())
    values = common[section] | own[section]
    values["data"] = common[section]["data"] | own[section].get("data", {})
    kind: Any = {"sft": SftConfig, "reward_model": RewardModelConfig}[section]
    return kind.model_validate(values), own.get("seed", common["seed"])


def model() -> Path:
    """The folder of the supervised model."""
    start, (settings, seed) = base(), recipe("sft")

    def make(folder: Path) -> None:
        data = [(row["prompt"], row[settings.completion_column]) for row in rows("train")]
        with torch.random.fork_rng():
            registry.load_code("rloo_cli.train.supervised.sft:of_strings")(
                start, data, settings, seed, folder
            )

    return kept("tldr_sft", _identity(start, settings, seed, rows("train")), make)


def reward_model() -> Path:
    """The folder of the reward model."""
    start, (settings, seed), data = model(), recipe("reward_model"), pair_rows("train")
    names = ("prompt", settings.chosen_column, settings.rejected_column)

    def make(folder: Path) -> None:
        texts = [tuple(row[name] for name in names) for row in data]
        learn = registry.load_code("rloo_cli.train.supervised.reward_model:of_strings")
        with torch.random.fork_rng():  # a new head draws its weights, which `new_head` replaces
            learn(start, texts, settings, seed, folder)

    return kept("tldr_reward", _identity(start, settings, seed, data), make)


def _identity(start: Path, settings: Any, seed: int, data: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    return f"{start.name}-{settings.model_dump_json()}-{seed}-{digest}"


# Preferences.


def pair_rows(split: str) -> list[dict[str, Any]]:
    """Two samples of the supervised model per post, the better one by a noisy look at the rule."""
    count = PAIRS[split]  # KeyError for a split there is not
    sampler = model()
    folder = kept("tldr_pairs", f"{sampler.name}-{PAIRS}-{NOISE}-{LONGEST}",
                  lambda folder: _make_pairs(sampler, folder))  # fmt: skip
    lines = (folder / f"{split}.jsonl").read_text().splitlines()
    assert len(lines) == count
    return [json.loads(line) for line in lines]


def _make_pairs(sampler: Path, folder: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(sampler, padding_side="left")
    learner = AutoModelForCausalLM.from_pretrained(sampler).eval()
    for split, count in PAIRS.items():
        prompts = [row["prompt"] for row in rows(split)[-count:]]
        dice = random.Random(f"tldr_pairs/{split}")
        with torch.random.fork_rng():
            torch.manual_seed(dice.getrandbits(32))
            samples = _sample(learner, tokens, [p for p in prompts for _ in range(2)])
        twos = zip(prompts, samples[::2], samples[1::2], strict=True)
        found = [_judged(*two, dice) for two in twos]
        text = "".join(f"{json.dumps(row)}\n" for row in found)
        (folder / f"{split}.jsonl").write_text(text)


def _sample(learner: Any, tokens: Any, prompts: list[str]) -> list[str]:
    """One completion for each prompt, at temperature 1."""
    found: list[str] = []
    for i in range(0, len(prompts), SAMPLED_AT_ONCE):
        batch = tokens(prompts[i : i + SAMPLED_AT_ONCE], padding=True, return_tensors="pt")
        out = learner.generate(
            **batch, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=LONGEST,
        )  # fmt: skip
        new = out[:, batch["input_ids"].shape[1] :]
        found += tokens.batch_decode(new, skip_special_tokens=True)
    return found


def _judged(prompt: str, one: str, other: str, dice: random.Random) -> dict[str, Any]:
    """Who prefers which: Bradley-Terry about the hidden rule, so that people are often wrong."""
    gap = posts.gold(prompt, one) - posts.gold(prompt, other)
    chosen, rejected = (one, other) if dice.random() < _sigmoid(gap / NOISE) else (other, one)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
