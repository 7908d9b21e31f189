"""Pairs judged by a reward of ours, which scores both texts as it scores any completion."""

from collections.abc import Sequence
from typing import Any

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.bin_packing import split_chunks
from rloo_cli.evaluation.judges.pairs import JudgedText, JudgePair
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.scoring import score_groups
from rloo_cli.utils import signals

SINGLE_TEXT_REWARDS = ("model", "http")  # rewards that read prompt and completion as one text


def judge_pairs_by_reward(
    reward: Reward,
    pairs: Sequence[JudgePair],
    tokenizer: Any,
    conversational: bool,
    state: TrainerState,
    batch_size: int,
) -> None:
    """Give every pair its value: the higher score wins, equal ones are a tie, none is no verdict.

    `size`: texts scored at once. Raises RewardError as the reward's own keys say.
    """
    told = [pair for pair in pairs if pair.theirs.text]
    for pair in pairs:
        pair.judge_answers = (
            [] if pair.theirs.text else [{"why": "there is no text to compare with"}]
        )
    for index in split_chunks(range(len(told)), max(1, batch_size // 2)):
        chosen = [told[i] for i in index]
        groups = [
            _group_of_pair(pair, reward.config.type in SINGLE_TEXT_REWARDS, tokenizer)
            for pair in chosen
        ]
        scores = score_groups(
            [reward], groups, RewardContext(conversational, state, poll=signals.raise_if_stopped)
        )
        for pair, (ours, theirs) in zip(chosen, scores.raw[0].tolist(), strict=True):
            known = ours == ours and theirs == theirs  # NaN: it does not apply, or failed
            said = {"ours": ours if ours == ours else None}
            pair.judge_answers = [said | {"theirs": theirs if theirs == theirs else None}]
            pair.value = 0.5 + 0.5 * ((ours > theirs) - (ours < theirs)) if known else None


def _group_of_pair(pair: JudgePair, reads_one_text: bool, tokenizer: Any) -> Group:
    """The prompt with both texts as its completions.

    What is stripped would stick to a plain prompt that ends in a word: where both are read as one
    text, a space stands between them, on either side of the pair.
    """
    found = pair.group
    joined = reads_one_text and isinstance(found.prompt, str) and found.prompt[-1:].strip() != ""
    rollouts = [
        _rollout_of_text(s, " " if joined else "", tokenizer) for s in (pair.ours, pair.theirs)
    ]
    return Group(pair.example_number, found.example, found.prompt, found.prompt_ids, rollouts)


def _rollout_of_text(side: JudgedText, separator: str, tokenizer: Any) -> Rollout:
    """A text as if it had been sampled: its ids end with EOS where it ended by itself."""
    text = separator + side.text
    end = [tokenizer.eos_token_id] if side.terminated and tokenizer.eos_token_id is not None else []
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]
    return Rollout(ids, text, "stop" if side.terminated else "length", side.terminated, 0, 0)
