"""Every metric of a run: its name in metrics.jsonl, its unit, how steps merge, what it means.

`python -m rloo_cli.reporting.metric_names` prints docs/metrics.md. A name may hold `<reward>`
(the name of a reward entry), `<k>` (a number), `<phase>` and `<name>`; a metric of an evaluation
begins with `eval_`, or with `eval_<set>_` for a set of eval.sets. A metric that a reward logs by
`log_metric` has the name that the reward chose.

How several steps make one line (`merge_steps`; a metric of an evaluation has no rule, ""):

last              the last step's value
min, max          the smallest, the largest of the steps' values
mean              each step counts alike: seconds and counts of a step
mean:COUNT        weighted by a count of each step (`step_metrics.mean_counts`)
rms:COUNT         a root mean square: the root of the mean of squares, weighted so
share:COUNT       the same as mean:COUNT, and 0 in a step that has no value
"""

import math
import re
from collections.abc import Sequence
from functools import cache

MetricValues = dict[str, float]
MetricMeaning = tuple[str, str, str, str]  # name, unit, how steps merge, what it means

PROGRESS_METRICS: list[MetricMeaning] = [
    ("step", "count", "last", "rollout batches so far; one line of metrics.jsonl per logged step"),
    ("updates", "count", "last", "optimizer updates so far"),
    ("episode", "count", "last", "completions of the steps' batches so far"),
    ("sampled_completions", "count", "last",
     "completions sampled so far: those of `episode`, those that zero_std_groups=resample threw "
     "away, and ReMax's greedy ones"),
    ("num_tokens", "tokens", "last",
     "tokens of prompts and completions of the steps' batches so far, what tools and environments "
     "said included"),
    ("epoch", "passes", "last", "prompts drawn so far, over the prompts of the data"),
    ("eps", "1/s", "last", "completions of `episode` per second, both since this attempt began"),
    ("step_time", "s", "mean", "seconds of the step"),
    ("time/<phase>", "s", "mean",
     "seconds of a phase: data, generation, reward, reference, old_logp, value, update, optimizer, "
     "sync (weights to the sampler), waiting (for other ranks), exposed (for a sampler beside the "
     "training), save (checkpoints, records, curves), evaluation"),
    ("time/idle", "s", "mean", "seconds of the step that no phase took"),
    ("learning_rate", "", "last", "learning rate of the step's updates, their mean"),
    ("lr", "", "last", "the same, as TRL names it"),
]  # fmt: skip

SCORE_METRICS: list[MetricMeaning] = [
    ("reward", "score", "mean:scored",
     "mean score of the completions that have one: the weighted sum of what the rewards "
     "return, before the KL penalty and before any shaping"),
    ("sampled_reward", "score", "mean:drawn_scored",
     "the same over every completion that was sampled, also of groups that "
     "zero_std_groups=resample threw away"),
    ("reward_std", "score", "mean:groups",
     "standard deviation of the scores inside a group (n - 1), mean over groups; with "
     "advantage_scale=batch that of the step"),
    ("reward_std_batch", "score", "mean:scored",
     "standard deviation of all scores of the step (n - 1)"),
    ("reward/<reward>/mean", "score", "mean:reward/<reward>",
     "mean of one reward over the completions it scored"),
    ("reward/<reward>/std", "score", "mean:reward/<reward>", "its standard deviation (n - 1)"),
    ("reward/<reward>/none_frac", "share", "mean:completions",
     "completions that it did not score: None, or a failure with on_error=none"),
    ("reward/<reward>/error_rate", "share", "mean:drawn", "completions whose call failed"),
    ("reward/<reward>/time", "s", "mean", "seconds its calls took"),
    ("reward/valid_frac", "share", "mean:completions",
     "completions with a score from at least one reward"),
    ("frac_reward_zero_std", "share", "mean:groups",
     "groups whose scores are all equal after shaping (penalties, normalising, clips), which is "
     "what advantages are made of: they teach nothing without a KL penalty. Absent where a score "
     "is not compared with its siblings' (another baseline, turn_rewards=credit)"),
    ("sampled_frac_reward_zero_std", "share", "mean:drawn_groups",
     "the same over every group that was sampled, also of those that zero_std_groups=resample "
     "threw away"),
    ("sampled_kept_frac", "share", "mean:drawn",
     "sampled completions that are in the step's batch; zero_std_groups=resample threw the "
     "others away"),
    ("groups/unscorable", "count", "mean", "groups with fewer than two scored completions"),
    ("groups/duplicates", "count", "mean", "completions that repeat a sibling token by token"),
    ("groups/dropped", "count", "mean", "groups left out by algorithm.zero_std_groups"),
    ("groups/resampled", "count", "mean", "prompts drawn in place of dropped groups"),
    ("objective/scores", "score", "mean:trained_scored",
     "mean score after shaping (clips, penalties), over the completions that were trained on: "
     "those that have an advantage and are not masked, of groups that were not dropped"),
    ("objective/kl", "nats", "mean:trained",
     "KL to the reference summed over a completion, mean over the completions whose KL is trained "
     "on: those of objective/scores, with kl_in=loss and with opd also those without a score"),
    ("objective/non_score_reward", "score", "mean:trained", "-beta times objective/kl"),
    ("objective/rlhf_reward", "score", "mean:trained", "objective/scores - beta * objective/kl"),
    ("objective/entropy", "nats", "mean:unmasked",
     "-log-probability of a whole completion, mean: the entropy of completions, estimated from "
     "the samples. By the sampler's log-probabilities over all completions that are not masked; "
     "by the trainer's over the forwarded ones where the sampler gives none"),
    ("objective/greedy_scores", "score", "mean:greedy",
     "mean score of ReMax's greedy completions"),
    ("advantages/mean", "score", "mean:usable",
     "mean advantage of the completions that can have one, masked ones included"),
    ("advantages/std", "score", "mean:usable", "standard deviation of the advantages"),
    ("advantages/abs_max", "score", "max", "largest advantage by size"),
    ("advantages/zero_frac", "share", "mean:usable", "completions with an advantage of exactly 0"),
    ("advantages/norm_skipped", "count", "mean",
     "1 where advantages were not normalised, their deviation being 0"),
]  # fmt: skip

COMPLETION_METRICS: list[MetricMeaning] = [
    ("completions/mean_length", "tokens", "mean:completions",
     "mean length of completions; min_, max_ beside it"),
    ("completions/min_length", "tokens", "min", "shortest completion"),
    ("completions/max_length", "tokens", "max", "longest completion"),
    ("completions/mean_terminated_length", "tokens", "mean:ended",
     "mean length of those that ended by themselves"),
    ("completions/min_terminated_length", "tokens", "min", "shortest of these"),
    ("completions/max_terminated_length", "tokens", "max", "longest of these"),
    ("completions/clipped_ratio", "share", "mean:completions",
     "completions cut at max_completion_length"),
    ("completions/unique_ratio", "share", "mean:completions",
     "different completions among those of the step"),
    ("completions/most_common_frac", "share", "mean:completions",
     "completions of the step that are the most common one, where its prompts differ"),
    ("val/num_eos_tokens", "count", "mean", "completions that ended by themselves"),
    ("data/dropped_long", "count", "last", "prompts left out as too long, since the start"),
    ("data/truncated", "count", "last", "prompts cut as too long, since the start"),
    ("staleness/mean", "updates", "mean:sampled_tokens",
     "updates between the weights that sampled a token and those that are trained, mean over "
     "the tokens"),
    ("staleness/max", "updates", "max", "its largest value"),
    ("staleness/span_max", "count", "max",
     "most versions of the weights in one completion (generation.overlap=carry)"),
    ("staleness/frac_lag<k>", "share", "share:sampled_tokens",
     "tokens of weights that are k updates old (generation.overlap=carry)"),
    ("overlap/exposed_s", "s", "mean",
     "seconds that the training waited for the sampler (generation.overlap)"),
    ("overlap/paced_s", "s", "mean",
     "seconds of these in which enough groups had finished, and older ones were waited for "
     "(generation.max_lag)"),
    ("overlap/hidden_s", "s", "mean", "seconds of sampling and scoring beside the training"),
    ("overlap/idle_s", "s", "mean", "seconds of the step in which nothing was sampled"),
]  # fmt: skip

TRAINING_METRICS: list[MetricMeaning] = [
    ("loss", "", "mean:updates", "loss of an update, mean over the step's updates"),
    ("policy_loss", "", "mean:updates", "the policy's part of it"),
    ("loss/policy_avg", "", "mean:updates", "the same, as PPO's papers name it"),
    ("loss/value_avg", "", "mean:updates", "the value model's loss (ppo)"),
    ("kl_loss", "", "mean:updates", "the KL term of the loss (algorithm.kl_in=loss)"),
    ("grad_norm", "", "mean:updates", "norm of the gradient before clipping"),
    ("grad_clip_fraction", "share", "mean:updates", "updates whose gradient was clipped"),
    ("update/changed_frac", "share", "mean:sampled_weights",
     "weights that an update changed, in the dtype that computes: near 0 where the dtype rounds "
     "the updates away. Seen in a sample of 4096 weights at most, with fsdp2 of each rank's "
     "shards. Absent with zero1, zero2, zero3, and with fsdp2's float32 masters"),
    ("kl", "nats", "mean:tokens", "KL to the reference per token"),
    ("entropy", "nats", "mean:entropy_tokens",
     "entropy of the next token, mean over the tokens that were forwarded. With beta 0 groups of "
     "equal scores are not: sampling/entropy is over all"),
    ("policy/entropy_avg", "nats", "mean:entropy_tokens", "the same, as TRL's RLOO named it"),
    ("clip_ratio/low_mean", "share", "mean:units",
     "ratios clipped from below, among forwarded completions (or tokens, by ratio_level)"),
    ("clip_ratio/high_mean", "share", "mean:units", "ratios clipped from above"),
    ("clip_ratio/region_mean", "share", "mean:units", "ratios clipped at all"),
    ("clip_ratio/low_min", "share", "min", "smallest share of a completion clipped from below"),
    ("clip_ratio/high_max", "share", "max", "largest share of a completion clipped from above"),
    ("cispo_clip_ratio", "share", "mean:units",
     "tokens whose ratio is above its cap, where the advantage is positive (policy_loss=cispo)"),
    ("delta_ratio", "share", "mean:units",
     "ratios above algorithm.delta where the advantage is negative"),
    ("policy/approxkl_avg", "nats", "mean:units",
     "half the mean squared log-ratio of new to old policy"),
    ("policy/clipfrac_avg", "share", "mean:units", "ratios clipped, as TRL's RLOO named it"),
    ("val/ratio", "", "mean:units", "mean ratio of new to old probabilities"),
    ("val/ratio_var", "", "mean:units", "its variance"),
    ("ratio/min", "", "min", "smallest ratio"),
    ("ratio/max", "", "max", "largest ratio"),
    ("val/clipfrac_avg", "share", "mean:value_tokens",
     "value predictions more than epsilon_value away from those that the step began with (ppo)"),
    ("value/explained_variance", "share", "mean:value_tokens",
     "variance of the returns that the values explain (ppo)"),
]  # fmt: skip

SAMPLER_METRICS: list[MetricMeaning] = [
    ("sampling/entropy", "nats", "mean:unmasked_tokens",
     "minus the sampler's log-probability of a token, mean over the tokens of all completions "
     "that are not masked, forwarded or not"),
    ("sampling/logp_diff_mean", "nats", "mean:gap_tokens",
     "mean size of the difference between the sampler's and the trainer's log-probability of a "
     "token"),
    ("sampling/logp_diff_rms", "nats", "rms:gap_tokens", "its root mean square"),
    ("sampling/logp_diff_max", "nats", "max", "its largest value"),
    ("sampling/logp_diff_lag0", "nats", "rms:gap_lag0",
     "root mean square where sampler and trainer had the same weights: numerics alone"),
    ("sampling/logp_diff_lag1", "nats", "rms:gap_lag1",
     "the same where the sampler's were an update older"),
    ("sampling/logp_diff_lag<k>", "nats", "rms:gap_lag<k>",
     "the same where they were k updates older (generation.overlap=carry)"),
    ("sampling/missing_frac", "share", "mean:unmasked_tokens",
     "tokens for which the sampler gave no log-probability"),
    ("sampling/kl", "nats", "mean:sequences", "KL of the sampler to the trainer, per completion"),
    ("sampling/importance_sampling_ratio/mean", "", "mean:weights",
     "mean weight of the sampler's correction"),
    ("sampling/importance_sampling_ratio/min", "", "min", "smallest weight"),
    ("sampling/importance_sampling_ratio/max", "", "max", "largest weight"),
    ("sampling/ess", "share", "mean:weights",
     "effective sample size of the weights before any cap"),
    ("sampling/capped_frac", "share", "mean:weights", "weights that were capped"),
    ("sampling/masked_frac", "share", "mean:weights", "weights that were set to 0"),
    ("sampling/mask_ids/mean", "count", "mean:mask_tokens",
     "ids that a token was chosen from (generation.return_sampling_mask)"),
    ("sampling/mask_ids/max", "count", "max", "most of them"),
    ("sampling/mask_bytes", "bytes", "mean:mask_tokens",
     "bytes of a token's sampling mask, in memory, in records and checkpoints"),
    ("vllm/restarts", "count", "last", "engines that were lost and started again"),
    ("vllm/weight_version", "updates", "last", "update whose weights the engine has"),
    ("vllm/synced_bytes", "bytes", "last", "bytes of the last weight update"),
]  # fmt: skip

SPEED_METRICS: list[MetricMeaning] = [
    ("perf/completions_per_s", "1/s", "mean:step_time", "completions per second of the step"),
    ("perf/tokens_per_s", "tokens/s", "mean:step_time",
     "tokens of prompts and completions per second of the step"),
    ("perf/tokens_per_s_per_gpu", "tokens/s", "mean:step_time", "the same per GPU"),
    ("perf/rollout_wait_frac", "share", "mean:step_time",
     "part of the step spent on data, generation and rewards"),
    ("perf/level", "0, 1, 2", "last",
     "layout of a forward pass: 0 shared prompts, 1 packed, 2 padded"),
    ("perf/rows", "tokens", "mean", "token positions of the training forwards, padding included"),
    ("perf/padding_frac", "share", "mean:rows", "of these, padding"),
    ("perf/forwarded_frac", "share", "mean:completions",
     "completions that were forwarded; others have no gradient"),
    ("perf/mfu", "share", "mean:training_s",
     "model FLOP/s of the train phase over the dense bfloat16 peak of the data sheet (H100: "
     "989 TFLOP/s), without padding and recomputation (GPU)"),
    ("memory/peak_gb", "GB", "max", "largest memory allocated on the GPU"),
    ("memory/reserved_gb", "GB", "max", "memory reserved on the GPU"),
]  # fmt: skip

# Of runs with an agent (docs/agents.md); of held-out sets too.
EPISODE_METRICS: list[MetricMeaning] = [
    ("agent/turns", "count", "mean:episodes", "sampled turns of an episode, mean"),
    ("agent/calls", "count", "mean:episodes", "calls of tools in an episode, mean"),
    ("agent/bad_calls", "count", "mean:episodes",
     "calls in an episode that could not be read, were of an unknown tool or had wrong "
     "arguments, mean"),
    ("agent/errors", "count", "mean:episodes",
     "calls in an episode whose tool raised, was late or ended, mean"),
    ("agent/failures", "share", "mean:episodes",
     "episodes whose environment failed: out of baseline and loss"),
    ("agent/tool_s", "s", "mean:calls", "seconds of a call, mean"),
    ("agent/retokenised", "count", "mean",
     "turns whose prompt was not the ids that were sampled before it; a run with one stops"),
    ("agent/refused", "count", "mean:episodes",
     "requests of an episode's agent that got an error (agent=proxy), mean"),
    ("agent/wrong_keys", "count", "last",
     "requests to the proxy (rank 0's) with a key of no episode, or of another, since the run "
     "began"),
    ("agent/truncated_by/turns", "share", "mean:episodes",
     "episodes that made a call in their last turn, or whose agent asked for one more"),
    ("agent/truncated_by/tokens", "share", "mean:episodes",
     "episodes ended by agent.max_episode_tokens"),
    ("agent/truncated_by/context", "share", "mean:episodes",
     "episodes ended by the model's context"),
    ("agent/truncated_by/completion", "share", "mean:episodes",
     "episodes with a turn that was cut at max_completion_length, which is their last"),
]  # fmt: skip

HELD_OUT_SCORES = ("reward", "reward/<reward>/mean", "avg@<k>", "pass@<k>")
EVALUATION_METRICS: list[MetricMeaning] = [
    ("reward", "score", "", "mean score of the greedy completions"),
    ("reward/<reward>/mean", "score", "", "mean of one reward over them"),
    ("reward/<reward>/error_rate", "share", "", "completions whose call failed"),
    ("completions/mean_length", "tokens", "", "mean length of the greedy completions"),
    ("completions/clipped_ratio", "share", "", "greedy completions cut at max_completion_length"),
    ("samples", "count", "", "greedy completions, one per prompt"),
    ("unscored", "count", "", "of these, without a score"),
    ("sampled_unscored", "count", "", "sampled completions without a score"),
    ("avg@<k>", "score", "", "mean over prompts of the mean score of K sampled completions"),
    ("pass@<k>", "share", "", "unbiased estimate that one of k sampled completions passes"),
    ("pass@<k>/prompts", "count", "",
     "prompts with at least k scored completions, where not all have"),
    *((f"{n}/se", "score", "", f"standard error of {n}, clustered by prompt")
      for n in HELD_OUT_SCORES),
    *((f"{n}/low", "score", "", f"lower end of the 95 % interval of {n}") for n in HELD_OUT_SCORES),
    *((f"{n}/high", "score", "", f"upper end of the 95 % interval of {n}")
      for n in HELD_OUT_SCORES),
    ("win_rate", "share", "", "pairs that a judge decides for ours; a tie is a half"),
    ("win_rate/low", "share", "", "lower end of its 95 % interval"),
    ("win_rate/high", "share", "", "upper end of its 95 % interval"),
    ("win_rate/length_controlled", "share", "",
     "win rate at equal lengths, by logistic regression"),
    ("win_rate/wins", "count", "", "pairs won"),
    ("win_rate/ties", "count", "", "pairs tied"),
    ("win_rate/losses", "count", "", "pairs lost"),
    ("win_rate/invalid", "count", "", "pairs without a verdict, left out"),
    ("win_rate/mean_length", "tokens", "", "mean length of our judged completions"),
    ("win_rate/mean_other_length", "tokens", "", "mean length of the others"),
]  # fmt: skip

JUDGE_METRICS: list[MetricMeaning] = [
    ("judge/win_rate", "share", "", "win rate over the pairs of all sets"),
    ("judge/invalid", "count", "", "pairs of all sets without a verdict"),
]  # fmt: skip

ALIAS_METRICS: list[MetricMeaning] = [
    ("sampling/sampling_logp_difference/mean", "nats", "", "sampling/logp_diff_mean"),
    ("sampling/sampling_logp_difference/max", "nats", "", "sampling/logp_diff_max"),
    ("rewards/<reward>/mean", "score", "", "reward/<reward>/mean, and so on for reward/..."),
]  # fmt: skip

OWN_METRICS: list[MetricMeaning] = [
    ("algorithm/<name>", "", "mean:algorithm_count/<name>",
     "a number that the loss of an algorithm of your own has in `Loss.metrics`, mean over the "
     "tokens, or completions, that were trained on"),
]  # fmt: skip

METRIC_SECTIONS: dict[str, tuple[str, list[MetricMeaning]]] = {
    "Progress and time": ("", PROGRESS_METRICS),
    "Scores, rewards and advantages": ("", SCORE_METRICS),
    "Prompts and completions": ("", COMPLETION_METRICS),
    "The update": ("", TRAINING_METRICS),
    "Sampler against trainer": ("", SAMPLER_METRICS),
    "Speed and memory": ("", SPEED_METRICS),
    "Evaluations": (
        "Each name stands behind `eval_`, or `eval_<set>_` for a set of `eval.sets`.",
        EVALUATION_METRICS,
    ),
    "A judge": ("", JUDGE_METRICS),
    "Episodes": (
        "With an agent, means over the step's episodes; behind `eval_` over greedy held-out ones.",
        EPISODE_METRICS,
    ),
    "Your own algorithm": ("", OWN_METRICS),
    "TRL's spelling": ("With `logging.trl_aliases=true`, beside ours.", ALIAS_METRICS),
}

# Those that tests/reporting/test_recomputed_metrics.py does not compute once more, and why.
# (Clocks and memory are not among them: nothing that a run writes shows those again.)
NOT_RECOMPUTED = {
    "vllm/restarts": "needs a server: tests/generation/on_vllm",
    "vllm/weight_version": "needs a server: tests/generation/on_vllm",
    "vllm/synced_bytes": "needs a server: tests/generation/on_vllm",
    "agent/refused": "needs an agent behind the proxy: tests/agents/test_external_agents.py",
    "agent/wrong_keys": "needs an agent behind the proxy: tests/agents/test_external_agents.py",
    "algorithm/<name>": "needs an algorithm of one's own: tests/house/test_add_an_algorithm.py",
    "win_rate/length_controlled": "a fitted regression: tests/evaluation holds it by simulation",
}

METRICS_PAGE_HEAD = """\
# Metrics

<!-- made by `python -m rloo_cli.reporting.metric_names > docs/metrics.md` -->

`metrics.jsonl` in a run's folder has a line of strict JSON per logged step and per evaluation. A
metric for which a step had no data is absent, never NaN or null. Where several steps make one line
(`logging.every`), a mean is weighted by the counts it was taken over (a root mean square by its
squares), minimum and maximum are true ones, a counter has its last value, and seconds and counts of
a step are means over the steps. All are reduced over all ranks by sums and counts. A `share` lies
between 0 and 1; a `score` has the unit of the reward; `nats` are natural logarithms.

What needs the trainer's log-probabilities (`entropy`, ratios, `sampling/...`) covers the
completions that were forwarded, `perf/forwarded_frac` of all: with `beta` 0 a group of equal scores
needs no forward, and `train.forward_all=true` forwards it too. `sampling/entropy`,
`sampling/missing_frac` and `objective/entropy` read the sampler's own, and cover all.

A completion that `mask_truncated_completions=true` masks has no loss and no KL. In the baseline of
its siblings it stays, with its score and a KL of 0, whatever `kl_in_baseline` says; `drop` takes it
out of both.

A metric that a reward logs by `log_metric(name, value)` stands beside these under that name, as the
mean over the step's calls.
"""

NOT_RECOMPUTED_HEAD = """\
## Not recomputed

`tests/reporting/test_recomputed_metrics.py` computes every metric of this page once more, from the
samples, rollouts and checkpoints of short runs, with code of its own. Beside clocks and memory
these are left out:

| metric | why |
|---|---|
"""


# Of the names of a section; those of episodes are a step's or a held-out set's.
NAME_PREFIXES = {"Evaluations": r"eval_(?:\w+_)?", "Episodes": r"(?:eval_(?:\w+_)?)?"}


@cache
def _metric_patterns() -> list[tuple[re.Pattern[str], MetricMeaning]]:
    patterns = []
    for name, (_, meanings) in METRIC_SECTIONS.items():
        prefix = NAME_PREFIXES.get(name, "")
        for meaning in meanings:
            text = re.escape(meaning[0]).replace("<reward>", r"[^/]+")
            text = text.replace("<phase>", r"[\w ]+").replace("<k>", r"\d+")
            text = text.replace("<name>", r".+")
            text = text.replace("rewards/[^/]+/mean", r"rewards/.+")  # an alias of each of them
            patterns.append((re.compile(prefix + text), meaning))
    return patterns


@cache
def metric_meaning(name: str) -> MetricMeaning | None:
    """The entry of a metric of metrics.jsonl; None for one that is not ours."""
    return next((m for pattern, m in _metric_patterns() if pattern.fullmatch(name)), None)


def merge_steps(steps: Sequence[MetricValues], counts: Sequence[MetricValues]) -> MetricValues:
    """The metrics of several steps as one line; `counts`: of each step.

    A step without a finite value for a metric is left out of that metric. A metric that is not in
    the tables was logged by a reward: its count has its name.
    """
    merged: MetricValues = {}
    for name in dict.fromkeys(name for metrics in steps for name in metrics):
        meaning = metric_meaning(name)
        kind, _, count = (f"mean:{name}" if meaning is None else meaning[2]).partition(":")
        if name.startswith("algorithm/"):
            count = name.replace("algorithm/", "algorithm_count/", 1)
        elif "<" in count:  # reward/<reward>, gap_lag<k>
            last = name.rpartition("/")[0 if "<reward>" in count else 2]
            count = last if "<reward>" in count else f"gap_lag{last.removeprefix('logp_diff_lag')}"
        absent = 0.0 if kind == "share" else math.nan
        found = [(m.get(name, absent), c) for m, c in zip(steps, counts, strict=True)]
        finite = [(value, c.get(count, 1)) for value, c in found if math.isfinite(value)]
        if finite:
            merged[name] = _merge_values(kind, *zip(*finite, strict=True))
    return merged


def _merge_values(kind: str, values: Sequence[float], weights: Sequence[float]) -> float:
    if kind in ("min", "max"):
        return min(values) if kind == "min" else max(values)
    if kind == "last" or not sum(weights):
        return values[-1]
    power = 2 if kind == "rms" else 1
    total = sum(w * v**power for v, w in zip(values, weights, strict=True))
    return float((total / sum(weights)) ** (1 / power))


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    parts = [METRICS_PAGE_HEAD]
    for title, (note, meanings) in METRIC_SECTIONS.items():
        lines = [f"| `{name}` | {unit or '-'} | {text} |" for name, unit, _, text in meanings]
        head = ["| metric | unit | what it is |", "|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *([note, ""] if note else []), *head, *lines]))
    parts.append(NOT_RECOMPUTED_HEAD)
    parts[-1] += "\n".join(f"| `{name}` | {why} |" for name, why in NOT_RECOMPUTED.items())
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    print(metrics_page(), end="")
