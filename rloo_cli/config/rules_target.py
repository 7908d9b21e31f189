"""Rules of `target`, the held-out score at which a run ends."""

from collections.abc import Collection, Iterator

from rloo_cli.config.pasted import guess_name
from rloo_cli.config.schema import EvalConfig, TargetConfig
from rloo_cli.utils.errors import Problem, value_problem


def held_out_score_names(
    evaluation: EvalConfig, rewards: Collection[str], sets: Collection[str]
) -> list[str]:
    """The scores of an evaluation that have an interval, as metrics.jsonl names them."""
    parts = ["reward", *(f"reward/{name}/mean" for name in rewards)]
    if (k := evaluation.num_generations) > 1:
        parts += [f"avg@{k}", *(f"pass@{n}" for n in evaluation.pass_ks)]
    if evaluation.judge is not None:
        parts.append("win_rate")
    prefixes = [f"eval_{name}_" if name else "eval_" for name in sets]
    return [prefix + part for prefix in prefixes for part in parts]


def target_problems(
    target: TargetConfig, evaluation: EvalConfig, rewards: Collection[str], sets: Collection[str]
) -> Iterator[Problem]:
    """Problems of a run's target. `sets`: the names of its held-out sets."""
    key = "target.metric"
    if target.metric is None:
        return
    names = held_out_score_names(evaluation, rewards, sets)
    if not names:
        why = "the run has no held-out set: data.eval_split is null, eval.sets is empty"
        fix = "null, or data.eval_split=NAME"
        yield value_problem(key, repr(target.metric), "is never measured", fix, why)
    elif target.metric not in names:
        why = f"its held-out scores: {', '.join(names)}"
        near = guess_name(target.metric, names)
        yield value_problem(key, repr(target.metric), "is not a score of this run", near, why)
    if target.at_least is None:
        why = f"target.metric = {target.metric} needs a value to reach"
        yield value_problem("target.at_least", "null", "is not a score", 0.9, why)
    if evaluation.every == 0:
        why = "the target is compared after each evaluation, and there is none during the training"
        yield value_problem("eval.every", 0, "does not go with a target", 20, why)
