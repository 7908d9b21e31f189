"""Trains the models of the TL;DR pipeline in miniature, as `recipes/tldr_mini.yaml` says.

    make:tldr_sft     trained on the summaries, as `rloo sft +recipe=tldr_mini` does
    make:tldr_pairs   examples: prompt, chosen, rejected; two samples of make:tldr_sft, preferred by
                      the hidden rule as noisy people would; train, test
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
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rloo_cli.config.schema import RewardModelConfig, SftConfig, TrainingConfig
from rloo_cli.data.cache import cached_folder
from rloo_cli.data.synthetic import tldr_posts as posts
from rloo_cli.data.synthetic import tldr_training
from rloo_cli.data.synthetic.tldr import tldr_base_folder, tldr_examples
from rloo_cli.utils import paths
from rloo_cli.utils.files import JsonObject

PAIRS_PER_SPLIT = {"train": 3000, "test": 300}
# In points of the hidden rule: a sample is preferred with probability sigmoid(difference / NOISE).
PREFERENCE_NOISE = 1.0
MAX_SAMPLE_TOKENS = 28  # tokens of a sample
SAMPLED_AT_ONCE = 256


def tldr_recipe(section: str) -> tuple[Any, int]:
    """Read `sft` or `reward_model` of recipes/tldr_mini.yaml over conf/config.yaml, and the seed.

    They are read as plain YAML: this is also called while Hydra composes.
    """
    common = yaml.safe_load((paths.CONF / "config.yaml").read_text())
    recipe = yaml.safe_load((paths.RECIPES / "tldr_mini.yaml").read_text())
    values = common[section] | recipe[section]
    values["data"] = common[section]["data"] | recipe[section].get("data", {})
    kind: type[TrainingConfig] = SftConfig if section == "sft" else RewardModelConfig
    return kind.model_validate(values), recipe.get("seed", common["seed"])


def tldr_sft_folder() -> Path:
    """The folder of the supervised model."""
    start, (settings, seed), data = tldr_base_folder(), tldr_recipe("sft"), tldr_examples("train")

    def make(folder: Path) -> None:
        texts = [(example["prompt"], example[settings.completion_column]) for example in data]
        with torch.random.fork_rng():
            tldr_training.train_sft_model(start, texts, settings, seed, folder)

    return cached_folder("tldr_sft", _cache_key(start, settings, seed, data), make)


def tldr_reward_folder() -> Path:
    """The folder of the reward model."""
    start, (settings, seed) = tldr_sft_folder(), tldr_recipe("reward_model")
    data = tldr_preference_pairs("train")
    names = ("prompt", settings.chosen_column, settings.rejected_column)

    def make(folder: Path) -> None:
        texts = [tuple(pair[name] for name in names) for pair in data]
        with torch.random.fork_rng():  # a new head is random until its own values replace it
            tldr_training.train_reward_model(start, texts, settings, seed, folder)

    return cached_folder("tldr_reward", _cache_key(start, settings, seed, data), make)


def _cache_key(base_path: Path, settings: TrainingConfig, seed: int, data: list[JsonObject]) -> str:
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    return f"{base_path.name}-{settings.model_dump_json()}-{seed}-{digest}"


def tldr_preference_pairs(split: str) -> list[JsonObject]:
    """Two samples of the supervised model for each post; a noisy rule says which is better."""
    count = PAIRS_PER_SPLIT[split]  # KeyError for a split that does not exist
    sampler = tldr_sft_folder()
    cache_key = f"{sampler.name}-{PAIRS_PER_SPLIT}-{PREFERENCE_NOISE}-{MAX_SAMPLE_TOKENS}"
    folder = cached_folder("tldr_pairs", cache_key, lambda folder: _make_pairs(sampler, folder))
    lines = (folder / f"{split}.jsonl").read_text().splitlines()
    assert len(lines) == count
    return [json.loads(line) for line in lines]


def _make_pairs(sampler: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sampler, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(sampler).eval()
    for split, count in PAIRS_PER_SPLIT.items():
        prompts = [example["prompt"] for example in tldr_examples(split)[-count:]]
        rng = random.Random(f"tldr_pairs/{split}")
        with torch.random.fork_rng():
            torch.manual_seed(rng.getrandbits(32))
            samples = _sample_completions(model, tokenizer, [p for p in prompts for _ in range(2)])
        pairs = [
            _preferred_pair(prompt, one, other, rng)
            for prompt, one, other in zip(prompts, samples[::2], samples[1::2], strict=True)
        ]
        text = "".join(f"{json.dumps(pair)}\n" for pair in pairs)
        (folder / f"{split}.jsonl").write_text(text)


def _sample_completions(
    learner: PreTrainedModel, tokens: PreTrainedTokenizerBase, prompts: list[str]
) -> list[str]:
    """Sample one completion for each prompt, at temperature 1."""
    texts: list[str] = []
    for i in range(0, len(prompts), SAMPLED_AT_ONCE):
        batch = tokens(prompts[i : i + SAMPLED_AT_ONCE], padding=True, return_tensors="pt")
        out = learner.generate(
            **batch, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_SAMPLE_TOKENS,
        )  # fmt: skip
        new = out[:, batch["input_ids"].shape[1] :]
        texts += tokens.batch_decode(new, skip_special_tokens=True)
    return texts


def _preferred_pair(prompt: str, one: str, other: str, rng: random.Random) -> JsonObject:
    """Sample a preference by Bradley-Terry on the hidden rule: often for the worse one."""
    gap = posts.score_summary(prompt, one) - posts.score_summary(prompt, other)
    first_wins = rng.random() < _sigmoid(gap / PREFERENCE_NOISE)
    chosen, rejected = (one, other) if first_wins else (other, one)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
