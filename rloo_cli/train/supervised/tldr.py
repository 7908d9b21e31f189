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
from rloo_cli.data.synthetic.cache import kept
from rloo_cli.data.synthetic.tldr import base, rows
from rloo_cli.train.supervised import reward_model as preferences
from rloo_cli.train.supervised import sft
from rloo_cli.utils import paths

PAIRS = {"train": 3000, "test": 300}
NOISE = 1.0  # points of the hidden rule: the preferred one wins with sigmoid(difference / NOISE)
LONGEST = 28  # tokens of a sample
SAMPLED_AT_ONCE = 256


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
            sft.of_strings(start, data, settings, seed, folder)

    return kept("tldr_sft", _identity(start, settings, seed, rows("train")), make)


def reward_model() -> Path:
    """The folder of the reward model."""
    start, (settings, seed), data = model(), recipe("reward_model"), pair_rows("train")
    names = ("prompt", settings.chosen_column, settings.rejected_column)

    def make(folder: Path) -> None:
        texts = [tuple(row[name] for name in names) for row in data]
        with torch.random.fork_rng():  # a new head draws its weights, which `new_head` replaces
            preferences.of_strings(start, texts, settings, seed, folder)

    return kept("tldr_reward", _identity(start, settings, seed, data), make)


def _identity(start: Path, settings: Any, seed: int, data: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    return f"{start.name}-{settings.model_dump_json()}-{seed}-{digest}"


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
