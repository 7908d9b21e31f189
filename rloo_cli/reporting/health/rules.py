"""The table of health rules: what can go wrong in a run, its symptoms, and what to change.

A rule with `check` judges a running run, at each logged line: its message is advice, or ends the
run (the config's `guards`). One with `found` judges a whole run: its message is a finding of
`rloo doctor RUN` and of the report. Rules that need samples or the config have only `found`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rloo_cli.reporting.health import metric_rules, reward_rules, sample_rules
from rloo_cli.reporting.health.evidence import Evidence

RuleFunction = Callable[[Evidence], str | None]
MIN_STEPS = 8  # logged steps of a whole run before a rule about a trend fires


@dataclass(frozen=True)
class HealthRule:
    """One fault of a run."""

    fix: str  # what to change, with the keys
    check: RuleFunction | None = None
    metrics: tuple[str, ...] = ()  # read by `check`
    found: RuleFunction | None = None
    title: str = ""  # of the finding; docs/inspect.md has it
    min_steps: int = MIN_STEPS  # logged steps before `found` is called
    silences: tuple[str, ...] = ()  # rules that contradict it or are only a consequence


# Name -> rule, the most severe first; those with `check` have the names of the config's `guards`.
HEALTH_RULES = {
    "updates_rounded_away": HealthRule(
        "Set model.dtype=float32 or distributed.master_weights=float32, or raise"
        " train.learning_rate",
        found=metric_rules.updates_rounded_away,
        title="updates are rounded away",
        silences=("rate_too_low",),
    ),
    "ignored_completions": HealthRule(
        "Check the reward function: call it on two different completions (rloo samples RUN --best)",
        found=sample_rules.ignored_completions,
        title="the reward ignores the completion",
        min_steps=0,
        silences=("zero_spread",),
    ),
    "failing_calls": HealthRule(
        "Check agent.parser and the code of the tools: rloo samples RUN shows their calls",
        found=metric_rules.failing_calls,
        title="tools or environments fail",
    ),
    "rate_too_high": HealthRule(
        "Lower train.learning_rate or algorithm.num_iterations",
        found=metric_rules.rate_too_high,
        title="learning rate too high",
        min_steps=0,
    ),
    "kl_rising": HealthRule(
        "Raise algorithm.beta or lower train.learning_rate, and read the samples",
        metric_rules.kl_rising,
        metrics=("kl",),
        found=metric_rules.kl_far_away,
        title="KL runs away",
    ),
    "entropy_collapse": HealthRule(
        "Lower train.learning_rate, or raise algorithm.beta or generation.temperature",
        metric_rules.entropy_collapse,
        metrics=("sampling/entropy", "entropy"),
        found=metric_rules.entropy_collapse,
        title="entropy collapse",
    ),
    "held_out_falling": HealthRule(
        "Take an earlier checkpoint (checkpoint.keep_last), lower train.learning_rate, raise"
        " algorithm.beta, or train on more prompts (data.path)",
        reward_rules.held_out_falling,
        metrics=reward_rules.HELD_OUT_METRICS,
        found=reward_rules.held_out_falling,
        title="the held-out score falls",
        min_steps=0,
    ),
    "one_completion": HealthRule(
        "If the reward pays for it on every prompt, fix the reward; else lower"
        " train.learning_rate or raise algorithm.beta",
        metric_rules.one_completion,
        metrics=("completions/most_common_frac",),
        found=metric_rules.one_completion,
        title="one completion for all prompts",
        silences=("duplicate_completions",),
    ),
    "length_hacking": HealthRule(
        "Use a reward that does not pay for length, add reward=overlong, or raise algorithm.beta",
        found=sample_rules.length_hacking,
        title="reward hacking by length",
    ),
    "reward_drowned": HealthRule(
        "Change reward.NAME.weight of the rewards",
        found=sample_rules.reward_drowned,
        title="one reward drowns the others",
    ),
    "zero_spread": HealthRule(
        "Raise algorithm.num_generations or generation.temperature, or use prompts (data.path) of"
        " suitable difficulty",
        metric_rules.zero_spread,
        metrics=("sampled_frac_reward_zero_std", "frac_reward_zero_std"),
        found=metric_rules.zero_spread,
        title="no spread within groups",
    ),
    "duplicate_completions": HealthRule(
        "Raise generation.temperature or algorithm.beta, or set generation.top_p=1.0 and top_k=0",
        found=sample_rules.duplicate_completions,
        title="duplicate completions",
    ),
    "many_truncated": HealthRule(
        "Raise generation.max_completion_length, or penalize truncation with"
        " algorithm.missing_eos_penalty",
        metric_rules.many_truncated,
        metrics=("completions/clipped_ratio",),
        found=metric_rules.all_truncated,
        title="all completions are truncated",
        min_steps=0,
    ),
    "truncated_sampling": HealthRule(
        "Set generation.return_sampling_mask=true; or top_p=1.0, top_k=0, min_p=null and"
        " repetition_penalty=1.0",
        found=metric_rules.truncated_sampling,
        title="sampling is truncated",
        min_steps=1,
        silences=("logp_drift",),
    ),
    "mismatch_with_depth": HealthRule(
        "Compare rope scaling, sliding window and attention kernels of generation.backend with the"
        " trainer's, or lower generation.max_completion_length",
        found=metric_rules.mismatch_with_depth,
        title="sampler and trainer disagree late in completions",
        min_steps=0,
        silences=("logp_drift",),
    ),
    "logp_drift": HealthRule(
        "Check generation.backend and its weight transfer, use one model.dtype for both, and"
        " model.lm_head_fp32=true",
        metric_rules.logp_drift,
        metrics=("sampling/logp_diff_rms", "staleness/mean"),
        found=metric_rules.sampler_mismatch,
        title="sampler and trainer disagree",
        min_steps=0,
    ),
    "data_seen_twice": HealthRule(
        "Remove duplicate rows from data.path",
        found=sample_rules.data_seen_twice,
        title="data is seen twice",
        min_steps=0,
    ),
    "high_variance": HealthRule(
        "Raise train.prompts_per_step or algorithm.num_generations",
        reward_rules.high_variance,
        metrics=("reward", "reward_std_batch"),
        found=reward_rules.reward_without_rise,
        title="high variance",
        min_steps=2 * MIN_STEPS,
        silences=("reward_flat",),
    ),
    "rate_too_low": HealthRule(
        "Raise train.learning_rate",
        found=metric_rules.rate_too_low,
        title="learning rate too low",
        min_steps=2 * MIN_STEPS,
    ),
    # Advice only: a healthy run may show these for a while, or at its end.
    "reward_falling": HealthRule(
        "Lower train.learning_rate, or raise algorithm.beta, which keeps the policy near its"
        " start; check the samples, and compare with held-out scores",
        reward_rules.reward_falling,
        metrics=("reward",),
        silences=("reward_flat",),
    ),
    "reward_swinging": HealthRule(
        "Lower train.learning_rate, or raise train.prompts_per_step or algorithm.beta",
        reward_rules.reward_swinging,
        metrics=("reward",),
        silences=("reward_flat",),
    ),
    "reward_flat": HealthRule(
        "Check the samples; if they can improve, raise train.learning_rate or"
        " algorithm.num_generations",
        reward_rules.reward_flat,
        metrics=("reward", "reward_std_batch"),
    ),
    "policy_clipping": HealthRule(
        "Lower train.learning_rate or algorithm.num_iterations",
        metric_rules.policy_clipping,
        metrics=("clip_ratio/region_mean",),
    ),
    "no_signal": HealthRule(
        "Check reward on the samples, then raise generation.temperature or"
        " algorithm.num_generations",
        metric_rules.no_signal,
        metrics=("frac_reward_zero_std",),
    ),
    "low_ess": HealthRule(
        "Use one dtype for both (model.dtype), or lower algorithm.correction.cap",
        metric_rules.low_ess,
        metrics=("sampling/ess",),
    ),
    "every_update_clipped": HealthRule(
        "No change needed; train.max_grad_norm sets the limit, and train.learning_rate the size"
        " of the steps",
        metric_rules.every_update_clipped,
        metrics=("grad_clip_fraction",),
    ),
}
