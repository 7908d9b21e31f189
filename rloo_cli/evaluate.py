"""A held-out split, answered greedily and scored by the run's own rewards.

Changes nothing in the run: no seed, no counter and no place in the data moves.
"""

from typing import Any

from rloo_cli.log import sample
from rloo_cli.minibatches import slices
from rloo_cli.parts import Run
from rloo_cli.rewards.arguments import Context
from rloo_cli.rewards.scoring import score

Row = dict[str, Any]


def evaluate(run: Run) -> tuple[Row, list[Row]]:
    """Score the held-out prompts at the weights of now; write metrics and samples.

    -> the metrics (`eval_*`), and every sample in the order of the split.
    """
    prompts = run.held_out
    if prompts is None:
        return {}, []
    run.log.phase("evaluation")
    count = min(len(prompts), run.config.eval.max_samples or len(prompts))
    state = run.state.seen_by_rewards(run)
    context = Context(prompts.conversational, state)
    # One completion per prompt: there is no group to normalise a reward in.
    settings = run.config.algorithm.model_copy(update={"multi_reward": "sum"})
    samples: list[Row] = []
    for index in slices(range(count), run.config.eval.batch_size):
        groups = [prompts.at(i) for i in index]
        run.generator.generate(groups, [[0] for _ in groups], greedy=True)
        scores = score(list(run.rewards), groups, context)
        weighted, scorable = run.algorithm.combine(scores.raw, scores.weights, settings)
        for p, group in enumerate(groups):
            row = sample(run, group, 0) | {"row": group.row}
            row["score"] = float(weighted[p, 0]) if scorable[p, 0] else None
            said = zip(scores.names, scores.raw[:, p, 0].tolist(), strict=True)
            row["rewards"] = {n: None if v != v else v for n, v in said}
            samples.append(row)
    metrics = _metrics(samples)
    run.log.held_out({"step": run.state.step, **metrics})
    run.log.save_samples(f"eval_{run.state.step:06d}", samples)
    run.clock.lap()  # its seconds are nobody's step
    return metrics, samples


def _metrics(samples: list[Row]) -> Row:
    row: Row = {}
    scored = [s["score"] for s in samples if s["score"] is not None]
    if scored:
        row["eval_reward"] = sum(scored) / len(scored)
    for name in samples[0]["rewards"]:
        said = [s["rewards"][name] for s in samples if s["rewards"][name] is not None]
        if said:
            row[f"eval_reward/{name}/mean"] = sum(said) / len(said)
    lengths = [s["completion_length"] for s in samples]
    row["eval_completions/mean_length"] = sum(lengths) / len(lengths)
    row["eval_completions/clipped_ratio"] = sum(not s["terminated"] for s in samples) / len(samples)
    row["eval_samples"] = len(samples)
    return row
