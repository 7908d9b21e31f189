"""`rloo doctor --deep`: prompts rendered and tokenized, and every reward called, on two rows.

The completions are made up: the answer in a row's columns, and the prompt's own words. Reward
models are loaded, and everything else that a reward loads; the policy's weights are not. torch is
imported.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from rloo_cli.config import rules_paths, synthetic, template
from rloo_cli.config.schema import RunConfig
from rloo_cli.data import splits
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.dataset import OpenedSplit
from rloo_cli.data.prompts import Prompts
from rloo_cli.inspection.environment.check_lines import CheckLines
from rloo_cli.policy import load, reward_load
from rloo_cli.rewards.engine import worker_calls
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.ready import run_ready_hooks
from rloo_cli.rewards.engine.scoring import RewardFailed, score_groups
from rloo_cli.rewards.model import REFERENCE_COLUMNS
from rloo_cli.utils import process_exit
from rloo_cli.utils.errors import RunError

TRIAL_ROWS = 2
TOKENIZED_ROWS = 64
TRIAL_TIMEOUT_S = 20.0  # per reward call; a run waits reward.NAME.timeout_s
# Before training, a reward's curriculum is at its start.
FIRST_STEP = TrainerState(0, 1, 1, 0.0, 0, 0, 1.0)


def try_prompts_and_rewards(
    lines: CheckLines,
    run: RunConfig,
    opened: Mapping[str | None, OpenedSplit],
    rewards: Sequence[Reward],
) -> None:
    """Tokenize the first rows of the training data, and call each reward on them."""
    process_exit.silence_libraries()
    training = {k: v for k, v in opened.items() if k is None or splits.is_mixture_key(k)}
    wanted = splits.split_configs(run, training=True).keys() - run.held_out.keys()
    if training.keys() != wanted:
        lines.add_warning("tokens", "no row of the training data was readable, see above")
        return
    with lines.noting_refusal("tokens"):
        for path in rules_paths.synthetic_model_paths(rules_paths.named_paths(run)):
            synthetic.resolve_model_path(path)
        tokenizer = load.load_policy_tokenizer(run.model)
        few = {key: _first_rows(split) for key, split in training.items()}
        context = load.read_max_positions(run.model)
        prompts = splits.tokenize_splits(run, few, tokenizer, context)[None]
        texts = splits.describe_first_prompt(prompts, tokenizer)
        for name, text in zip(("prompt", "tokens"), texts, strict=True):
            lines.add_ok(name, text)
        _check_beginning(lines, prompts, tokenizer)
        count = min(TRIAL_ROWS, len(prompts))
        groups = [_trial_group(prompts, i, tokenizer, rewards) for i in range(count)]
        length = run.generation.max_completion_length
        for reward in rewards:
            _try_reward(lines, reward, groups, prompts, tokenizer, length)


def _first_rows(split: OpenedSplit) -> OpenedSplit:
    """Enough rows to see whether most prompts are too long."""
    rows = split.dataset
    return OpenedSplit(rows.select(range(min(TOKENIZED_ROWS, len(rows)))), 0)


def _check_beginning(
    lines: CheckLines, prompts: Prompts, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A beginning-of-text token that the tokenizer puts before text, but prompts lack.

    Two of them were refused earlier.
    """
    bos = tokenizer.bos_token_id
    by_itself = list(tokenizer("a")["input_ids"])[:1]
    begins = prompts.prompt_ids[0][:1]
    if bos is not None and by_itself == [bos] and begins != [bos]:
        what = f"the prompt lacks {tokenizer.bos_token!r}, which the tokenizer puts first"
        fix = "model.chat_template=FILE.jinja with {{ bos_token }} at its beginning"
        lines.add_warning("beginning", f"{what}; the model was trained with it", fix)
    elif bos is not None and begins == [bos]:
        lines.add_ok("beginning", f"one {tokenizer.bos_token!r}")
    else:
        lines.add_ok("beginning", "no beginning-of-text token, and the tokenizer adds none")


def _trial_group(
    prompts: Prompts, index: int, tokenizer: PreTrainedTokenizerBase, rewards: Sequence[Reward]
) -> Group:
    """A row with two completions: the answer in its columns, or its prompt; and the prompt."""
    group = prompts.group_of(index)
    text = template.prompt_text(group.prompt)
    columns = [*REFERENCE_COLUMNS, *(c for reward in rewards for c in reward.required_columns)]
    values = (group.example.get(name) for name in columns)
    answer = next((v for v in values if isinstance(v, str) and v), text)
    group.rollouts = [_trial_rollout(t, tokenizer) for t in (answer, text)]
    return group


def _trial_rollout(text: str, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """A text as if it had been sampled and had ended by itself."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Rollout(ids, text, "stop", True, 0, 0, [-1.0] * len(ids))


def _try_reward(
    lines: CheckLines,
    reward: Reward,
    groups: Sequence[Group],
    prompts: Prompts,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
) -> None:
    """Let a reward load what it needs, then call it once on all completions.

    `length`: generation.max_completion_length.
    """
    name, began = f"try {reward.name}", time.monotonic()
    limit = min(reward.config.timeout_s, TRIAL_TIMEOUT_S)
    config = reward.config.model_copy(
        update={"timeout_s": limit, "retries": 0, "on_error": "raise"}
    )
    reward = replace(reward, config=config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    by_set: dict[str | None, Prompts] = {None: prompts}
    try:
        worker_calls.start_reward_workers([reward])
        run_ready_hooks([reward], tokenizer, by_set, length, device, _drop, reward_load)
        loaded_s, began = time.monotonic() - began, time.monotonic()
        context = RewardContext(prompts.conversational, FIRST_STEP)
        scores = score_groups([reward], groups, context)
    except RewardFailed as error:
        problem = error.problems[0]
        rows = problem.where.partition("step 1, ")[2] or problem.where
        what = f"{problem.what} ({reward.location}, {rows})"
        lines.add_failure(name, what, "fix the reward: rloo reward test, or call it by hand")
        return
    except RunError as error:
        for problem in error.problems:
            lines.add_problem(name, problem)
        return
    _describe_scores(lines, name, scores.raw[0].tolist(), loaded_s, time.monotonic() - began)


def _drop(note: str) -> None:
    """A reward's notes while loading belong to a run."""


def _describe_scores(
    lines: CheckLines, name: str, scores: list[list[float]], loaded_s: float, seconds: float
) -> None:
    """The scores of (answer, prompt's own words) for each row."""
    flat = [value for row in scores for value in row]
    shown = "; ".join(
        f"row {i}: " + ", ".join("None" if math.isnan(v) else f"{v:.4g}" for v in row)
        for i, row in enumerate(scores)
    )
    took = f"{seconds:.2g} s" + (f" after {loaded_s:.2g} s to load" if loaded_s > 0.5 else "")
    found = f"{shown} (the answer, the prompt as an answer), in {took}"
    if all(map(math.isnan, flat)):
        lines.add_warning(name, f"{found}: it does not apply to these rows", "check its column")
    else:
        lines.add_ok(name, found)
