"""A rollout as plain values, beside its tokens: what checkpoints and records of rollouts keep.

Token ids and log-probabilities are kept apart, as flat tensors of a whole step. An episode's turns
are pieces of them: `prompt` and `sampled` are the numbers of ids that a turn was told and sampled.
"""

from rloo_cli.data.batch import ROLLOUT_FIELDS, Rollout, Turn
from rloo_cli.utils.files import JsonObject

EPISODE_FIELDS = (
    "failed", "opening_ids", "environment", "environment_reward", "episode_facts", "columns",
)  # fmt: skip
TURN_FIELDS = ("text", "finish_reason", "weight_version", "calls", "observation", "reward")


def dump_rollout(rollout: Rollout) -> JsonObject:
    """Everything of a rollout but its ids and their log-probabilities."""
    values: JsonObject = {n: getattr(rollout, n) for n in ROLLOUT_FIELDS} | {"mask": rollout.mask}
    if rollout.turns is None:
        return values
    turns = [
        {n: getattr(turn, n) for n in TURN_FIELDS}
        | {"prompt": len(turn.prompt_ids), "sampled": len(turn.sampled_ids)}
        | {"logp": turn.logp is not None, "begins_row": turn.begins_row}
        for turn in rollout.turns
    ]
    return values | {n: getattr(rollout, n) for n in EPISODE_FIELDS} | {"turns": turns}


def load_rollout(ids: list[int], logp: list[float] | None, saved: JsonObject) -> Rollout:
    """The rollout of these values, with its T ids and, where they are known, T log-probabilities.

    Values of older versions are read as well. Raises KeyError and TypeError for others.
    """
    fields = [n for n in (*ROLLOUT_FIELDS, *EPISODE_FIELDS, "mask") if n in saved]
    rollout = Rollout(ids, behaviour_logp=logp, **{n: saved[n] for n in fields})
    if "turns" not in saved:
        return rollout
    rollout.turns, start = [], 0
    for turn in saved["turns"]:
        begin, end = start + turn["prompt"], start + turn["prompt"] + turn["sampled"]
        has_logp = logp is not None and turn.get("logp", True)
        values = {n: turn[n] for n in TURN_FIELDS}
        its_logp = logp[begin:end] if logp is not None and has_logp else None
        new_row = bool(turn.get("begins_row", False))
        rollout.turns.append(
            Turn(ids[start:begin], ids[begin:end], its_logp, **values, begins_row=new_row)
        )
        start = end
    return rollout
