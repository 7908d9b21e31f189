"""A rollout as plain values without its tokens: for checkpoints and records of rollouts.

Token ids, log-probabilities and sampling masks are kept apart, as flat tensors of a whole step. An
episode's turns are pieces of them: `prompt` and `sampled` are the numbers of ids that a turn
reads and samples.
"""

from collections.abc import Sequence

from rloo_cli.data.batch import ROLLOUT_FIELDS, Rollout, Turn
from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.utils.files import JsonObject

EPISODE_FIELDS = (
    "failed", "opening_ids", "environment", "environment_reward", "episode_facts", "columns",
)  # fmt: skip
TURN_FIELDS = ("text", "finish_reason", "weight_version", "calls", "observation", "reward")


def dump_rollout(rollout: Rollout) -> JsonObject:
    """Everything in a rollout but its ids, their log-probabilities and sampling masks."""
    values: JsonObject = {n: getattr(rollout, n) for n in ROLLOUT_FIELDS} | {"mask": rollout.mask}
    if rollout.version_spans is not None:
        values["version_spans"] = rollout.version_spans
    if rollout.turns is None:
        return values
    turns = [
        {n: getattr(turn, n) for n in TURN_FIELDS}
        | {"prompt": len(turn.prompt_ids), "sampled": len(turn.sampled_ids)}
        | {"logp": turn.logp is not None, "begins_row": turn.begins_row}
        | ({"images": turn.images} if turn.images else {})
        for turn in rollout.turns
    ]
    return values | {n: getattr(rollout, n) for n in EPISODE_FIELDS} | {"turns": turns}


def sampled_lengths(lengths: Sequence[int], saved: Sequence[JsonObject]) -> list[int]:
    """The numbers of sampled tokens of completions of these numbers of ids and these values."""
    return [
        length if (mask := values.get("mask")) is None else sum(mask)
        for length, values in zip(lengths, saved, strict=True)
    ]


def load_rollout(
    ids: list[int],
    logp: list[float] | None,
    saved: JsonObject,
    sampling_mask: SamplingMask | None = None,
) -> Rollout:
    """The rollout of these values, with its T ids and, where they are known, T log-probabilities
    and the mask of its S sampled tokens.

    Raises KeyError and TypeError for values of another kind.
    """
    fields = (*ROLLOUT_FIELDS, "mask", *(EPISODE_FIELDS if "turns" in saved else ()))
    values = {n: saved[n] for n in fields}
    rollout = Rollout(ids, behaviour_logp=logp, sampling_mask=sampling_mask, **values)
    if (spans := saved.get("version_spans")) is not None:
        rollout.version_spans = [(version, count) for version, count in spans]
    if "turns" not in saved:
        return rollout
    rollout.turns, start, sampled = [], 0, 0
    for turn in saved["turns"]:
        begin, end = start + turn["prompt"], start + turn["prompt"] + turn["sampled"]
        has_logp = logp is not None and turn["logp"]
        values = {n: turn[n] for n in TURN_FIELDS}
        its_logp = logp[begin:end] if logp is not None and has_logp else None
        values["begins_row"] = bool(turn["begins_row"])
        values["images"] = list(turn.get("images", ()))
        if sampling_mask is not None:
            values["sampling_mask"] = sampling_mask.slice_tokens(sampled, sampled + end - begin)
        rollout.turns.append(Turn(ids[start:begin], ids[begin:end], its_logp, **values))
        start, sampled = end, sampled + end - begin
    return rollout
