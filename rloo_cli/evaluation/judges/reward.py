"""Pairs judged by a reward, which scores both texts as it scores any completion."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.bin_packing import split_chunks
from rloo_cli.evaluation.judges.pairs import JudgedText, JudgePair
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.scoring import score_groups
from rloo_cli.utils import signals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SINGLE_TEXT_REWARDS = ("model", "http")  # rewards that read prompt and completion as one text


def judge_pairs_by_reward(
    reward: Reward,
    pairs: Sequence[JudgePair],
    tokenizer: "PreTrainedTokenizerBase",
    conversational: bool,
    state: TrainerState,
    batch_size: int,  # texts scored at once
) -> None:
    """Set the value of every pair: the higher score wins, equal ones tie. Raises RewardError."""
    comparable = [pair for pair in pairs if pair.theirs.text]
    for pair in pairs:
        missing = not pair.theirs.text
        pair.judge_answers = [{"why": "no text to compare with"}] if missing else []
    context = RewardContext(conversational, state, poll=signals.raise_if_stopped)
    one_text = reward.config.type in SINGLE_TEXT_REWARDS
    for indices in split_chunks(range(len(comparable)), max(1, batch_size // 2)):
        chosen = [comparable[i] for i in indices]
        groups = [_group_of_pair(pair, one_text, tokenizer) for pair in chosen]
        scores = score_groups([reward], groups, context)
        for pair, (ours, theirs) in zip(chosen, scores.raw[0].tolist(), strict=True):
            sides = {"ours": ours, "theirs": theirs}
            pair.judge_answers = [{n: s if s == s else None for n, s in sides.items()}]
            both = ours == ours and theirs == theirs  # NaN: not applicable, or failed
            pair.value = 0.5 + 0.5 * ((ours > theirs) - (ours < theirs)) if both else None


def _group_of_pair(
    pair: JudgePair, reads_one_text: bool, tokenizer: "PreTrainedTokenizerBase"
) -> Group:
    """The prompt with both texts as its completions.

    The stripped texts would stick to a plain prompt that ends in a word: if prompt and text are
    read as one text, a space separates them, for both sides of the pair.
    """
    group, prompt = pair.group, pair.group.prompt
    joined = reads_one_text and isinstance(prompt, str) and prompt[-1:].strip() != ""
    texts = (pair.ours, pair.theirs)
    rollouts = [_rollout_of_text(text, " " if joined else "", tokenizer) for text in texts]
    return Group(pair.example_number, group.example, prompt, group.prompt_ids, rollouts)


def _rollout_of_text(
    side: JudgedText, separator: str, tokenizer: "PreTrainedTokenizerBase"
) -> Rollout:
    """A text as if it had been sampled: its ids end with EOS if it ended on its own."""
    text, eos = separator + side.text, tokenizer.eos_token_id
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"]]
    ids += [eos] if side.terminated and eos is not None else []
    return Rollout(ids, text, "stop" if side.terminated else "length", side.terminated, 0, 0)
