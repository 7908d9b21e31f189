"""What is trained of the TL;DR pipeline in miniature, as `recipes/tldr_mini.yaml` says.

    make:tldr_sft     trained on the summaries, as `rloo sft +recipe=tldr_mini` does
    make:tldr_pairs   rows: prompt, chosen, rejected; two samples of make:tldr_sft, preferred by the
                      hidden rule as noisy people would; train, test
    make:tldr_reward  trained on the pairs, as `rloo reward-model +recipe=tldr_mini` does

Each is made on first use and kept in the cache.
"""

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_cli.config.schema import RewardModelConfig, SftConfig
from rloo_cli.data.synthetic import tldr_posts as posts
from rloo_cli.data.synthetic.cache import cached_folder
from rloo_cli.data.synthetic.tldr import tldr_base_folder, tldr_examples
from rloo_cli.train.supervised import reward_model as preferences
from rloo_cli.train.supervised import sft
from rloo_cli.utils import paths
from rloo_cli.utils.files import JsonObject

PAIRS_PER_SPLIT = {"train": 3000, "test": 300}
PREFERENCE_NOISE = (
    1.0  # points of the hidden rule: the preferred one wins with sigmoid(difference / NOISE)
)
MAX_SAMPLE_TOKENS = 28  # tokens of a sample
SAMPLED_AT_ONCE = 256


def tldr_recipe(section: str) -> tuple[Any, int]:
    """`sft` or `reward_model` of recipes/tldr_mini.yaml over conf/config.yaml, and the seed.

    Read as plain YAML: this is also called where Hydra is at work.
    """
    common = yaml.safe_load((paths.CONF / "config.yaml").read_text())
    own = yaml.safe_load((paths.RECIPES / "tldr_mini.yaml").read_text())
    values = common[section] | own[section]
    values["data"] = common[section]["data"] | own[section].get("data", {})
    kind: Any = {"sft": SftConfig, "reward_model": RewardModelConfig}[section]
    return kind.model_validate(values), own.get("seed", common["seed"])


def tldr_sft_folder() -> Path:
    """The folder of the supervised model."""
    start, (settings, seed) = tldr_base_folder(), tldr_recipe("sft")

    def make(folder: Path) -> None:
        data = [(row["prompt"], row[settings.completion_column]) for row in tldr_examples("train")]
        with torch.random.fork_rng():
            sft.train_sft_model(start, data, settings, seed, folder)

    return cached_folder(
        "tldr_sft", _cache_key(start, settings, seed, tldr_examples("train")), make
    )


def tldr_reward_folder() -> Path:
    """The folder of the reward model."""
    start, (settings, seed), data = (
        tldr_sft_folder(),
        tldr_recipe("reward_model"),
        tldr_preference_pairs("train"),
    )
    names = ("prompt", settings.chosen_column, settings.rejected_column)

    def make(folder: Path) -> None:
        texts = [tuple(row[name] for name in names) for row in data]
        with torch.random.fork_rng():  # a new head draws its weights, which `new_head` replaces
            preferences.train_reward_model(start, texts, settings, seed, folder)

    return cached_folder("tldr_reward", _cache_key(start, settings, seed, data), make)


def _cache_key(base_path: Path, settings: Any, seed: int, data: list[JsonObject]) -> str:
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    return f"{base_path.name}-{settings.model_dump_json()}-{seed}-{digest}"


def tldr_preference_pairs(split: str) -> list[JsonObject]:
    """Two samples of the supervised model per post, the better one by a noisy look at the rule."""
    count = PAIRS_PER_SPLIT[split]  # KeyError for a split there is not
    sampler = tldr_sft_folder()
    folder = cached_folder(
        "tldr_pairs",
        f"{sampler.name}-{PAIRS_PER_SPLIT}-{PREFERENCE_NOISE}-{MAX_SAMPLE_TOKENS}",
        lambda folder: _make_pairs(sampler, folder),
    )
    lines = (folder / f"{split}.jsonl").read_text().splitlines()
    assert len(lines) == count
    return [json.loads(line) for line in lines]


def _make_pairs(sampler: Path, folder: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(sampler, padding_side="left")
    learner = AutoModelForCausalLM.from_pretrained(sampler).eval()
    for split, count in PAIRS_PER_SPLIT.items():
        prompts = [row["prompt"] for row in tldr_examples(split)[-count:]]
        dice = random.Random(f"tldr_pairs/{split}")
        with torch.random.fork_rng():
            torch.manual_seed(dice.getrandbits(32))
            samples = _sample_completions(learner, tokens, [p for p in prompts for _ in range(2)])
        twos = zip(prompts, samples[::2], samples[1::2], strict=True)
        found = [_preferred_pair(*two, dice) for two in twos]
        text = "".join(f"{json.dumps(row)}\n" for row in found)
        (folder / f"{split}.jsonl").write_text(text)


def _sample_completions(learner: Any, tokens: Any, prompts: list[str]) -> list[str]:
    """One completion for each prompt, at temperature 1."""
    found: list[str] = []
    for i in range(0, len(prompts), SAMPLED_AT_ONCE):
        batch = tokens(prompts[i : i + SAMPLED_AT_ONCE], padding=True, return_tensors="pt")
        out = learner.generate(
            **batch, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_SAMPLE_TOKENS,
        )  # fmt: skip
        new = out[:, batch["input_ids"].shape[1] :]
        found += tokens.batch_decode(new, skip_special_tokens=True)
    return found


def _preferred_pair(prompt: str, one: str, other: str, rng: random.Random) -> JsonObject:
    """Who prefers which: Bradley-Terry about the hidden rule, so that people are often wrong."""
    gap = posts.score_summary(prompt, one) - posts.score_summary(prompt, other)
    chosen, rejected = (
        (one, other) if rng.random() < _sigmoid(gap / PREFERENCE_NOISE) else (other, one)
    )
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
