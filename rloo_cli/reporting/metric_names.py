"""Every metric of a run: its name in metrics.jsonl, its unit, and what it means.

`python -m rloo_cli.reporting.metric_names` prints docs/metrics.md. A name may hold `<reward>`
(the name of a reward entry), `<k>` (a number) and `<phase>`; a metric of an evaluation begins with
`eval_`, or with `eval_<set>_` for a set of eval.sets. A metric that a reward logs by `log_metric`
has the name that the reward chose.
"""

import re
from functools import cache

MetricMeaning = tuple[str, str, str]  # name, unit, what it means

PROGRESS_METRICS: list[MetricMeaning] = [
    ("step", "count", "rollout batches so far; one line of metrics.jsonl per logged step"),
    ("updates", "count", "optimizer updates so far"),
    ("episode", "count", "completions sampled and trained on so far"),
    ("num_tokens", "tokens", "tokens of prompts and completions so far"),
    ("epoch", "passes", "prompts drawn so far, over the prompts of the data"),
    ("eps", "1/s", "completions per second since this attempt began"),
    ("step_time", "s", "seconds of the step"),
    ("time/<phase>", "s", "seconds of a phase: data, generation, reward, reference, old_logp,"
     " value, update, optimizer, sync, waiting, saving, evaluation"),
    ("time/idle", "s", "seconds of the step that no phase took"),
    ("learning_rate", "", "learning rate of the step's updates, their mean"),
    ("lr", "", "the same, as TRL names it"),
]  # fmt: skip

SCORE_METRICS: list[MetricMeaning] = [
    ("reward", "score", "mean score of the completions that have one: the weighted sum of what the"
     " rewards return, before the KL penalty and before any shaping"),
    ("reward_std", "score", "standard deviation of the scores inside a group (n - 1), mean over"
     " groups; with advantage_scale=batch that of the step"),
    ("reward_std_batch", "score", "standard deviation of all scores of the step (n - 1)"),
    ("reward/<reward>/mean", "score", "mean of one reward over the completions it scored"),
    ("reward/<reward>/std", "score", "its standard deviation (n - 1)"),
    ("reward/<reward>/none_frac", "share", "completions that it did not score: None, or a failure"
     " with on_error=none"),
    ("reward/<reward>/error_rate", "share", "completions whose call failed"),
    ("reward/<reward>/time", "s", "seconds its calls took"),
    ("reward/valid_frac", "share", "completions with a score from at least one reward"),
    ("frac_reward_zero_std", "share", "groups whose scores are all equal, which teach nothing"
     " without a KL penalty"),
    ("groups/unscorable", "count", "groups with fewer than two scored completions"),
    ("groups/duplicates", "count", "completions that repeat a sibling token by token"),
    ("groups/dropped", "count", "groups left out by algorithm.zero_std_groups"),
    ("groups/resampled", "count", "prompts drawn in place of dropped groups"),
    ("objective/scores", "score", "mean score after shaping (clips, penalties), over the"
     " completions that were trained on"),
    ("objective/kl", "nats", "KL to the reference summed over a completion, mean over the"
     " completions that were trained on"),
    ("objective/non_score_reward", "score", "-beta times objective/kl"),
    ("objective/rlhf_reward", "score", "objective/scores - beta * objective/kl"),
    ("objective/entropy", "nats", "-log-probability of a whole completion, mean: the entropy of"
     " completions, estimated from the samples"),
    ("objective/greedy_scores", "score", "mean score of ReMax's greedy completions"),
    ("advantages/mean", "score", "mean advantage"),
    ("advantages/std", "score", "standard deviation of the advantages"),
    ("advantages/abs_max", "score", "largest advantage by size"),
    ("advantages/zero_frac", "share", "completions with an advantage of exactly 0"),
    ("advantages/norm_skipped", "count", "1 where advantages were not normalised, their deviation"
     " being 0"),
]  # fmt: skip

COMPLETION_METRICS: list[MetricMeaning] = [
    ("completions/mean_length", "tokens", "mean length of completions; min_, max_ beside it"),
    ("completions/min_length", "tokens", "shortest completion"),
    ("completions/max_length", "tokens", "longest completion"),
    ("completions/mean_terminated_length", "tokens", "mean length of those that ended by"
     " themselves"),
    ("completions/min_terminated_length", "tokens", "shortest of these"),
    ("completions/max_terminated_length", "tokens", "longest of these"),
    ("completions/clipped_ratio", "share", "completions cut at max_completion_length"),
    ("completions/unique_ratio", "share", "different completions among those of the step"),
    ("completions/most_common_frac", "share", "completions of the step that are the most common"
     " one, where its prompts differ"),
    ("val/num_eos_tokens", "count", "completions that ended by themselves"),
    ("data/dropped_long", "count", "prompts left out as too long, since the start"),
    ("data/truncated", "count", "prompts cut as too long, since the start"),
    ("staleness/mean", "updates", "updates between the weights that sampled a token and those that"
     " are trained, mean over the tokens"),
    ("staleness/max", "updates", "its largest value"),
    ("staleness/span_max", "count", "most versions of the weights in one completion"
     " (generation.overlap=carry)"),
    ("staleness/frac_lag<k>", "share", "tokens of weights that are k updates old"
     " (generation.overlap=carry)"),
    ("overlap/exposed_s", "s", "seconds that the training waited for the sampler"
     " (generation.overlap)"),
    ("overlap/paced_s", "s", "seconds of these in which enough groups had finished, and older ones"
     " were waited for (generation.overlap=carry)"),
    ("overlap/hidden_s", "s", "seconds of sampling and scoring beside the training"),
    ("overlap/idle_s", "s", "seconds of the step in which nothing was sampled"),
    ("overlap/begun_anew", "", "1 where an update of overlap=stream began anew on the whole batch:"
     " a group above train.micro_batch_tokens, or a lost sampler"),
]  # fmt: skip

TRAINING_METRICS: list[MetricMeaning] = [
    ("loss", "", "loss of an update, mean over the step's updates"),
    ("policy_loss", "", "the policy's part of it"),
    ("loss/policy_avg", "", "the same, as PPO's papers name it"),
    ("loss/value_avg", "", "the value model's loss (ppo)"),
    ("kl_loss", "", "the KL term of the loss (algorithm.kl_in=loss)"),
    ("grad_norm", "", "norm of the gradient before clipping"),
    ("grad_clip_fraction", "share", "updates whose gradient was clipped"),
    ("update/changed_frac", "share", "some weights (4096 at most) that an update changed, in the"
     " dtype that computes: near 0 where the dtype rounds the updates away"),
    ("kl", "nats", "KL to the reference per token"),
    ("entropy", "nats", "entropy of the next token, mean over completion tokens"),
    ("policy/entropy_avg", "nats", "the same, as TRL's RLOO named it"),
    ("clip_ratio/low_mean", "share", "ratios clipped from below, among forwarded completions (or"
     " tokens, by ratio_level)"),
    ("clip_ratio/high_mean", "share", "ratios clipped from above"),
    ("clip_ratio/region_mean", "share", "ratios clipped at all"),
    ("clip_ratio/low_min", "share", "smallest share of a completion clipped from below"),
    ("clip_ratio/high_max", "share", "largest share of a completion clipped from above"),
    ("cispo_clip_ratio", "share", "weights at their cap (loss_type=cispo)"),
    ("delta_ratio", "share", "ratios above algorithm.delta where the advantage is negative"),
    ("policy/approxkl_avg", "nats", "half the mean squared log-ratio of new to old policy"),
    ("policy/clipfrac_avg", "share", "ratios clipped, as TRL's RLOO named it"),
    ("val/ratio", "", "mean ratio of new to old probabilities"),
    ("val/ratio_var", "", "its variance"),
    ("ratio/min", "", "smallest ratio"),
    ("ratio/max", "", "largest ratio"),
    ("val/clipfrac_avg", "share", "value predictions that were clipped (ppo)"),
    ("value/explained_variance", "share", "variance of the returns that the values explain (ppo)"),
]  # fmt: skip

SAMPLER_METRICS: list[MetricMeaning] = [
    ("sampling/logp_diff_mean", "nats", "mean size of the difference between the sampler's and the"
     " trainer's log-probability of a token"),
    ("sampling/logp_diff_rms", "nats", "its root mean square"),
    ("sampling/logp_diff_max", "nats", "its largest value"),
    ("sampling/logp_diff_lag0", "nats", "root mean square where sampler and trainer had the same"
     " weights: numerics alone"),
    ("sampling/logp_diff_lag1", "nats", "the same where the sampler's were an update older"),
    ("sampling/logp_diff_lag<k>", "nats", "the same where they were k updates older"
     " (generation.overlap=carry)"),
    ("sampling/missing_frac", "share", "tokens for which the sampler gave no log-probability"),
    ("sampling/kl", "nats", "KL of the sampler to the trainer, per completion"),
    ("sampling/importance_sampling_ratio/mean", "", "mean weight of the sampler's correction"),
    ("sampling/importance_sampling_ratio/min", "", "smallest weight"),
    ("sampling/importance_sampling_ratio/max", "", "largest weight"),
    ("sampling/ess", "share", "effective sample size of the weights before any cap"),
    ("sampling/capped_frac", "share", "weights that were capped"),
    ("sampling/masked_frac", "share", "weights that were set to 0"),
    ("sampling/mask_ids/mean", "count", "ids that a token was chosen from"
     " (generation.return_sampling_mask)"),
    ("sampling/mask_ids/max", "count", "most of them"),
    ("sampling/mask_bytes", "bytes", "bytes of a token's sampling mask, in memory, in records and"
     " checkpoints"),
    ("vllm/restarts", "count", "engines that were lost and started again"),
    ("vllm/weight_version", "updates", "update whose weights the engine has"),
    ("vllm/synced_bytes", "bytes", "bytes of the last weight update"),
]  # fmt: skip

SPEED_METRICS: list[MetricMeaning] = [
    ("perf/completions_per_s", "1/s", "completions per second of the step"),
    ("perf/tokens_per_s", "tokens/s", "tokens of prompts and completions per second of the step"),
    ("perf/tokens_per_s_per_gpu", "tokens/s", "the same per GPU"),
    ("perf/rollout_wait_frac", "share", "part of the step spent on data, generation and rewards"),
    ("perf/level", "0, 1, 2", "layout of a forward pass: 0 shared prompts, 1 packed, 2 padded"),
    ("perf/rows", "tokens", "token positions of the training forwards, padding included"),
    ("perf/padding_frac", "share", "of these, padding"),
    ("perf/forwarded_frac", "share", "completions that were forwarded; others have no gradient"),
    ("perf/mfu", "share", "model FLOP/s of the train phase over the dense bfloat16 peak of the data"
     " sheet (H100: 989 TFLOP/s), without padding and recomputation (GPU)"),
    ("memory/peak_gb", "GB", "largest memory allocated on the GPU"),
    ("memory/reserved_gb", "GB", "memory reserved on the GPU"),
]  # fmt: skip

# Of runs with an agent (docs/agents.md); of held-out sets too.
EPISODE_METRICS: list[MetricMeaning] = [
    ("agent/turns", "count", "sampled turns of an episode, mean"),
    ("agent/calls", "count", "calls of tools in an episode, mean"),
    ("agent/bad_calls", "count", "calls in an episode that could not be read, were of an unknown"
     " tool or had wrong arguments, mean"),
    ("agent/errors", "count", "calls in an episode whose tool raised, was late or ended, mean"),
    ("agent/failures", "share", "episodes whose environment failed: out of baseline and loss"),
    ("agent/tool_s", "s", "seconds of a call, mean"),
    ("agent/retokenised", "count", "turns whose prompt was not the ids that were sampled before it;"
     " a run with one stops"),
    ("agent/refused", "count", "requests of an episode's agent that got an error (agent=proxy),"
     " mean"),
    ("agent/wrong_keys", "count", "requests to the proxy (rank 0's) with a key of no episode, or of"
     " another, since the run began"),
    ("agent/truncated_by/turns", "share", "episodes that made a call in their last turn, or whose"
     " agent asked for one more"),
    ("agent/truncated_by/tokens", "share", "episodes ended by agent.max_episode_tokens"),
    ("agent/truncated_by/context", "share", "episodes ended by the model's context"),
    ("agent/truncated_by/completion", "share", "episodes with a turn that was cut at"
     " max_completion_length, which is their last"),
]  # fmt: skip

EVALUATION_METRICS: list[MetricMeaning] = [
    ("reward", "score", "mean score of the greedy completions"),
    ("reward/<reward>/mean", "score", "mean of one reward over them"),
    ("reward/<reward>/error_rate", "share", "completions whose call failed"),
    ("completions/mean_length", "tokens", "mean length of the greedy completions"),
    ("completions/clipped_ratio", "share", "greedy completions cut at max_completion_length"),
    ("samples", "count", "greedy completions, one per prompt"),
    ("unscored", "count", "of these, without a score"),
    ("sampled_unscored", "count", "sampled completions without a score"),
    ("avg@<k>", "score", "mean over prompts of the mean score of K sampled completions"),
    ("pass@<k>", "share", "unbiased estimate that one of k sampled completions passes"),
    ("pass@<k>/prompts", "count", "prompts with at least k scored completions, where not all have"),
    ("win_rate", "share", "pairs that a judge decides for ours; a tie is a half"),
    ("win_rate/low", "share", "lower end of its 95 % interval"),
    ("win_rate/high", "share", "upper end of its 95 % interval"),
    ("win_rate/length_controlled", "share", "win rate at equal lengths, by logistic regression"),
    ("win_rate/wins", "count", "pairs won"),
    ("win_rate/ties", "count", "pairs tied"),
    ("win_rate/losses", "count", "pairs lost"),
    ("win_rate/invalid", "count", "pairs without a verdict, left out"),
    ("win_rate/mean_length", "tokens", "mean length of our judged completions"),
    ("win_rate/mean_other_length", "tokens", "mean length of the others"),
]  # fmt: skip

JUDGE_METRICS: list[MetricMeaning] = [
    ("judge/win_rate", "share", "win rate over the pairs of all sets"),
    ("judge/invalid", "count", "pairs of all sets without a verdict"),
]

ALIAS_METRICS: list[MetricMeaning] = [
    ("sampling/sampling_logp_difference/mean", "nats", "sampling/logp_diff_mean"),
    ("sampling/sampling_logp_difference/max", "nats", "sampling/logp_diff_max"),
    ("rewards/<reward>/mean", "score", "reward/<reward>/mean, and so on for reward/..."),
]

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
    "TRL's spelling": ("With `logging.trl_aliases=true`, beside ours.", ALIAS_METRICS),
}

METRICS_PAGE_HEAD = """\
# Metrics

<!-- made by `python -m rloo_cli.reporting.metric_names > docs/metrics.md` -->

`metrics.jsonl` in a run's folder has a line of strict JSON per logged step and per evaluation. A
metric for which a step had no data is absent, never NaN or null. Where several steps make one line
(`logging.every`), a mean is weighted by the counts it was taken over, minimum and maximum are true
ones, and a counter has its last value. All are reduced over all ranks by sums and counts. A `share`
lies between 0 and 1; a `score` has the unit of the reward; `nats` are natural logarithms.

A metric that a reward logs by `log_metric(name, value)` stands beside these under that name, as the
mean over the step's calls.
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
            text = text.replace("rewards/[^/]+/mean", r"rewards/.+")  # an alias of each of them
            patterns.append((re.compile(prefix + text), meaning))
    return patterns


def metric_meaning(name: str) -> MetricMeaning | None:
    """The name, unit and meaning of a metric of metrics.jsonl; None for one that is not ours."""
    return next((m for pattern, m in _metric_patterns() if pattern.fullmatch(name)), None)


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    parts = [METRICS_PAGE_HEAD]
    for title, (note, meanings) in METRIC_SECTIONS.items():
        lines = [f"| `{name}` | {unit or '-'} | {text} |" for name, unit, text in meanings]
        head = ["| metric | unit | what it is |", "|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *([note, ""] if note else []), *head, *lines]))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    print(metrics_page(), end="")
