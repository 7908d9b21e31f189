"""Runs with a fault really in them, and healthy ones: what `rloo doctor RUN` says of each.

    python bench/pathologies.py [--seeds 1 2]    all runs that have no row yet, one after the other
    python bench/pathologies.py --page           the tables of docs/doctor.md, from the rows

The faults are a learning rate, a reward, a dtype, a data set or a key of sampling; no file is edited.
Thresholds were set on seed 1 and are shown on seed 2. A row of bench/pathologies.jsonl a run.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import results

HERE = Path(__file__).resolve().parents[1]
ROWS, PAGE = Path(__file__).with_name("pathologies.jsonl"), HERE / "docs" / "doctor.md"
ROOT = Path("runs/pathologies")
BEGIN, END = "<!-- made: {} -->", "<!-- end: {} -->"
Words = tuple[str, ...]

REWARDS = '''
import itertools, random
from rloo_cli.plugin import texts
calls = itertools.count()

def longer(completions, **kwargs):
    return [float(len(text)) for text in texts(completions)]

def of_the_prompt(prompts, completions, **kwargs):
    return [float(len(text) % 7) for text in texts(prompts)]

def noise(completions, **kwargs):
    return [random.Random(next(calls)).random() for _ in completions]

def constant(completions, **kwargs):
    return [1.0 for _ in completions]

def few_letters(completions, **kwargs):
    return [-float(len(set(text))) for text in texts(completions)]
'''

SUMS: Words = (
    "+recipe=quickstart", "max_steps=30", "train.prompts_per_step=16", "eval.max_samples=50",
    "eval.every=0", "logging.samples_every=1", "resume=never",
)  # fmt: skip
WORDS: Words = (
    "+recipe=smoke", "max_steps=30", "train.prompts_per_step=8", "logging.samples_every=1",
    "train.learning_rate=3e-3", "train.lr_scheduler=constant", "algorithm.num_generations=8",
)  # fmt: skip


def scored_by(name: str) -> Words:
    """The words that make a function of the file above the only reward."""
    return (f"reward.NAME.path={{folder}}/rewards.py:{name}",)


SICK: dict[str, tuple[str, Words]] = {
    "length": ("reward hacking by length", (*WORDS, *scored_by("longer"))),
    "drowned": (
        "one reward drowns the others",
        (*SUMS, "reward=[exact_match,length_chars]", "reward.length_chars.weight=100",
         "reward.exact_match.column=answer", "reward.exact_match.extract=text"),
    ),
    "flat": ("no spread within groups", (*SUMS, *scored_by("constant"))),
    "truncated": (
        "all completions are truncated",
        (*SUMS, "generation.max_completion_length=1"),
    ),
    "kl": (
        "KL runs away",
        (*WORDS, *scored_by("few_letters"), "algorithm.beta=0", "train.learning_rate=1e-2"),
    ),
    "entropy": (
        "entropy collapse",
        (*SUMS, *scored_by("noise"), "train.learning_rate=1e-3", "algorithm.beta=0"),
    ),
    "rounded": (
        "updates are rounded away",
        (*SUMS, "model.dtype=bfloat16", "train.learning_rate=1e-9"),
    ),
    "top_p": ("sampling is truncated", (*SUMS, "generation.top_p=0.5")),
    "mismatch": (
        "sampler and trainer disagree",
        (*SUMS, "generation=vllm_colocate", "generation.colocate.dtype=bfloat16", "max_steps=12"),
    ),
    "too_high": (
        "learning rate too high",
        (*SUMS, "train.learning_rate=3e-2", "algorithm.num_iterations=2"),
    ),
    "too_low": ("learning rate too low", (*SUMS, "train.learning_rate=1e-9")),
    "twice": ("data is seen twice", (*SUMS, "data.path={folder}/doubled.jsonl")),
    "ignored": ("the reward ignores the completion", (*SUMS, *scored_by("of_the_prompt"))),
}  # fmt: skip
