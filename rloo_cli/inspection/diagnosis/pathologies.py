"""Eighteen things that go wrong in RL of language models, each seen in a run's own files.

A rule reads `RunEvidence` and returns the figures that make it speak, or None. Thresholds were set
on short runs that really have the fault. A rule whose figures the run does not have is silent.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean, median, pstdev

from rloo_cli.inspection.diagnosis.evidence import (
    RunEvidence,
    episode_turns,
    finite_field,
    group_pairs,
    pair_correlation,
    shown_prompt,
    whole_text,
)
from rloo_cli.inspection.sample_files import SampleRecord
from rloo_cli.reporting import advice

MIN_STEPS = 8  # logged steps before a rule about their course speaks
MIN_COMPLETIONS = 24  # before a correlation over completions is believed
LENGTH_CORRELATION = 0.6  # of score and length within groups: above it the length is the reward
LENGTH_GROWTH = 1.25  # of the mean length, or its inverse, from the first quarter to the last
DROWNING_SHARE = 0.97  # of the score's variance within groups that one of several rewards has
DROWNED_SHARE = 0.25  # of its own completions a drowned reward still tells apart
TRUNCATED_SHARE = 0.9
UNCHANGED_SHARE = 1e-3  # of sampled weights that an update changes; 4096 are looked at
MISMATCH_RMS = 0.02  # nats; bfloat16 on both sides has up to that, by rounding alone
FLOAT32_RMS = 0.004  # nats; two kernels of float32 differ by a thousandth, TF32 by .002
RATIO_LIMIT = 20.0  # a completion's ratio of new to old probability
KL_JUMP = 10.0  # nats per completion in a single step's update: the policy is another one
SMALL_KL = 1e-4  # nats per token at the end of a run of MIN_STEPS or more
DOUBLED_SHARE = 0.05  # of an epoch's draws whose prompt was drawn before in it, from another row
OVERLAP_SHARE = 0.05  # of held-out prompts that were trained on
LEARNT_SHARE = 0.15  # of the span of all scores, by which the reward of a run that learns rises
MASTERED_SHARE = 0.5  # of the way to the best score: a policy that went it may be certain
RISE_NOISE = 2.0  # standard errors between the run's halves: above it the reward has risen
KL_END = 1.0  # nats per token: e times as likely as under the reference, token by token
NOISE_GAP = 0.25  # of the scores' spread: what equal completions of a prompt differ by
ALIKE_SHARE = 0.5  # of the groups whose completions are one text that is not the best
FAILED_SHARE = 0.5  # of episodes without a score, or of calls that a tool did not answer
PROMPT_IS_THE_TASK = (None, "tools")  # agents for which equal prompts are one task


def length_hacking(run: RunEvidence) -> str | None:
    lengths = run.start_and_end("completions/mean_length")
    turns = run.start_and_end("agent/turns")
    if lengths is not None and turns is not None:  # more turns are what an agent may have to learn
        lengths = lengths[0] / max(turns[0], 1.0), lengths[1] / max(turns[1], 1.0)
    alike = (part for group in run.groups() for part in _split_by_turns(group))
    pairs = group_pairs(alike, "score", "completion_length")
    correlation = pair_correlation(pairs) if len(pairs) >= MIN_COMPLETIONS else None
    if lengths is None or correlation is None or run.steps < MIN_STEPS:
        return None
    before, after = (max(length, 1e-9) for length in lengths)
    grown = after / before if correlation > 0 else before / after
    if abs(correlation) < LENGTH_CORRELATION or grown < LENGTH_GROWTH:
        return None
    of_a_turn = " of a turn" if turns is not None else ""
    return (
        f"within groups the score follows the length (correlation {correlation:+.2f} over"
        f" {len(pairs)} completions), and the mean length{of_a_turn} went from {before:.3g} to"
        f" {after:.3g}"
    )


def _split_by_turns(group: list[SampleRecord]) -> list[list[SampleRecord]]:
    """The group's completions by their number of turns; without an agent they have none."""
    parts: dict[int, list[SampleRecord]] = defaultdict(list)
    for sample in group:
        parts[len(episode_turns(sample))].append(sample)
    return [*parts.values()]


def reward_drowned(run: RunEvidence) -> str | None:
    rewards = run.config_value("reward")
    weights = {
        name: float(entry.get("weight", 1.0))
        for name, entry in (rewards if isinstance(rewards, dict) else {}).items()
        if isinstance(entry, dict) and isinstance(entry.get("weight", 1.0), int | float)
    }
    used = {name for name, weight in weights.items() if weight}
    if len(used) < 2 or run.steps < MIN_STEPS:
        return None
    spread: dict[str, float] = defaultdict(float)
    told_apart: dict[str, int] = defaultdict(int)
    groups: dict[str, int] = defaultdict(int)
    for group in run.groups():
        for name in used:
            values = [
                float(v)
                for sample in group
                if isinstance(v := (sample.get("rewards") or {}).get(name), int | float)
            ]
            if len(values) > 1:
                spread[name] += weights[name] ** 2 * pstdev(values) ** 2
                told_apart[name] += pstdev(values) > 0
                groups[name] += 1
    total = sum(spread.values())
    if not total:
        return None
    largest = max(spread, key=lambda name: spread[name])
    drowned = [
        name
        for name in sorted(used - {largest})
        if groups[name] and told_apart[name] >= DROWNED_SHARE * groups[name]
    ]
    if spread[largest] < DROWNING_SHARE * total or not drowned:
        return None
    return (
        f"{largest} makes {spread[largest] / total:.1%} of the score's variance within groups;"
        f" {' and '.join(drowned)}, which tells completions apart too, has no say"
    )


def no_group_spread(run: RunEvidence) -> str | None:
    share = run.end_mean("sampled_frac_reward_zero_std")  # also of what resampling threw away
    share = run.end_mean("frac_reward_zero_std") if share is None else share
    if share is None or share <= advice.ZERO_STD_SHARE or run.steps < MIN_STEPS:
        return None
    if ignored_completions(run) or _is_learning(run):
        return None
    return f"{share:.0%} of the last groups have one score for all completions"


def _is_learning(run: RunEvidence) -> bool:
    """Whether the reward rose by much of what the scores span: then certainty is what it learnt."""
    reward, scores = run.start_and_end("reward"), _all_scores(run)
    if reward is None or not scores:
        return False
    return reward[1] - reward[0] > LEARNT_SHARE * (max(scores) - min(scores)) > 0


def _has_mastered(run: RunEvidence) -> bool:
    """Whether the reward rose by half of what lay between its start and the best score."""
    reward, scores = run.start_and_end("reward"), _all_scores(run)
    if reward is None or not scores:
        return False
    return reward[1] - reward[0] > MASTERED_SHARE * (max(scores) - reward[0]) > 0


def _all_scores(run: RunEvidence) -> list[float]:
    found = (finite_field(sample, "score") for group in run.groups() for sample in group)
    return [score for score in found if score is not None]


def all_truncated(run: RunEvidence) -> str | None:
    share = run.end_mean("completions/clipped_ratio")
    wanted = [run.config_value(f"generation.{key}") for key in ("min_tokens", "ignore_eos")]
    if share is None or share < TRUNCATED_SHARE or any(wanted):
        return None
    length = run.config_value("generation.max_completion_length")
    where = ", in their last turn" if run.metric_values("agent/turns") else ""
    return f"{share:.0%} of the last completions were cut at {length} tokens{where}"


def failing_calls(run: RunEvidence) -> str | None:
    """Episodes without a score, and calls that no tool answered."""
    failures, calls = run.end_mean("agent/failures"), run.end_mean("agent/calls")
    bad, errors = run.end_mean("agent/bad_calls"), run.end_mean("agent/errors")
    if failures is None or calls is None or bad is None or errors is None:
        return None
    if run.steps < MIN_STEPS:
        return None
    if failures > FAILED_SHARE:
        return f"the environment of {failures:.0%} of the last episodes failed: they have no score"
    if bad + errors > FAILED_SHARE * max(calls, bad + errors):
        return (
            f"of {calls:.3g} calls in an episode at the end, {bad:.3g} could not be read or were"
            f" of no such tool or arguments, and {errors:.3g} ended in an error of the tool"
        )
    if run.config_value("agent.kind") == "rollout":  # its function makes calls of its own
        return None
    if not any(run.metric_values("agent/calls")) and not any(run.metric_values("agent/bad_calls")):
        return f"no tool was called in {run.steps} steps"
    return None


def kl_runaway(run: RunEvidence) -> str | None:
    found = run.start_and_end("kl")
    if found is None or run.steps < MIN_STEPS:
        return None
    return f"kl went from {found[0]:.3g} to {found[1]:.3g}" if found[1] > KL_END else None


def entropy_collapse(run: RunEvidence) -> str | None:
    names = {name for step in run.record.step_metrics for name in step}
    name = advice.entropy_metric(names)
    values, end = run.metric_values(name), run.end_mean(name)
    if end is None or run.steps < MIN_STEPS or not values or _has_mastered(run):
        return None
    return (
        f"{name} went from {values[0]:.3g} to {end:.3g} nats"
        if end < advice.ENTROPY_SHARE * values[0]
        else None
    )


def held_out_falling(run: RunEvidence) -> str | None:
    figures, reward = advice.held_out_fall(run.held_out_history), run.start_and_end("reward")
    if figures is None or reward is None:
        return figures
    return f"{figures}; reward went from {reward[0]:.3g} to {reward[1]:.3g}"


def one_completion(run: RunEvidence) -> str | None:
    """However well it pays: a policy that mastered its prompts answers them differently."""
    values = run.metric_values("completions/most_common_frac")[-advice.RECENT_LINES :]
    share = fmean(values) if values else 0.0
    if share <= advice.MOST_COMMON_SHARE or run.steps < MIN_STEPS:
        return None
    return f"{share:.0%} of the last completions are one text, given to different prompts"


def duplicate_completions(run: RunEvidence) -> str | None:
    scores = _all_scores(run)
    if run.steps < MIN_STEPS or not scores or _has_mastered(run) or one_completion(run):
        return None
    groups = [group for group in run.groups(last=True) if len(group) > 1]
    alike = 0
    for group in groups:
        found = [score for sample in group if (score := finite_field(sample, "score")) is not None]
        of_one_text = len({whole_text(sample) for sample in group}) == 1
        alike += of_one_text and bool(found) and max(found) < max(scores)
    if alike <= ALIKE_SHARE * len(groups):
        return None
    return (
        f"in {alike} of the last {len(groups)} groups all completions are one text, which is not"
        " the best: no sibling can show a better one"
    )


def high_variance(run: RunEvidence) -> str | None:
    rewards, spreads = run.metric_values("reward"), run.metric_values("reward_std_batch")
    if run.steps < 2 * MIN_STEPS or len(rewards) < 4 or not spreads:
        return None
    early, late, noise = advice.half_means(rewards)
    share = advice.reward_noise_share(rewards, spreads)
    if share <= advice.NOISE_SHARE or late - early > RISE_NOISE * noise:
        return None
    return (
        f"the mean score of a step has {share:.0%} of the scores' variance, as that of"
        f" {1 / share:.2g} completions has, and in {run.steps} steps it has not risen by more"
    )


def updates_rounded_away(run: RunEvidence) -> str | None:
    trained = [  # in steps with a gradient: without one there is nothing that could be rounded
        share
        for step in run.record.step_metrics
        if (share := finite_field(step, "update/changed_frac")) is not None
        and (finite_field(step, "learning_rate") or 0.0) > 0
        and (finite_field(step, "grad_norm") or 0.0) > 0
    ]
    if len(trained) < MIN_STEPS or fmean(trained) >= UNCHANGED_SHARE:
        return None
    dtype = run.config_value("model.dtype")
    return (
        f"an update changes {fmean(trained):.2%} of the weights (dtype {dtype}): those that sample"
        " stay as they are"
    )


def truncated_sampling(run: RunEvidence) -> str | None:
    limits = {
        "top_p": lambda value: value < 1,
        "top_k": lambda value: value > 0,
        "min_p": lambda value: value > 0,
        "repetition_penalty": lambda value: value != 1,
    }
    if run.config_value("generation.return_sampling_mask") is True:  # the others are exact then
        limits = {"repetition_penalty": limits["repetition_penalty"]}
    set_keys = [
        f"generation.{name}={value:g}"
        for name, biased in limits.items()
        if isinstance(value := run.config_value(f"generation.{name}"), int | float)
        and biased(value)
    ]
    gap = run.end_mean("sampling/logp_diff_mean")
    if not set_keys or not run.steps:
        return None
    seen = f"; sampler and trainer differ by {gap:.3g} nats a token" if gap is not None else ""
    return f"{' and '.join(set_keys)}: the gradient is of another distribution than samples{seen}"


def sampler_mismatch(run: RunEvidence) -> str | None:
    gap = run.end_mean("sampling/logp_diff_rms")
    lag = run.end_mean("staleness/mean") or 0.0
    exact = run.weights_dtype == "float32" and lag == 0  # no rounding or update explains a gap
    limit = FLOAT32_RMS if exact else MISMATCH_RMS
    if gap is None or gap < limit or truncated_sampling(run):
        return None
    cause = (
        f"staleness: the weights that sampled are {lag:.2g} updates behind"
        if lag > 0
        else "numerics: the sampler had the same weights, so dtype or kernels differ"
    )
    return f"sampler and trainer differ by {gap:.3g} nats a token (root mean square); {cause}"


def rate_too_high(run: RunEvidence) -> str | None:
    ratios = run.metric_values("ratio/max")
    exploded = [ratio for ratio in ratios if ratio > RATIO_LIMIT]
    jumps = run.metric_values("policy/approxkl_avg")
    if len(exploded) >= 2:
        most = f"at most {max(exploded):.3g}"
        return f"in {len(exploded)} steps a ratio is above {RATIO_LIMIT:g}, {most}"
    if sum(jump > KL_JUMP for jump in jumps) >= 2:
        return f"a step's updates move the policy by up to {max(jumps):.3g} nats"
    reward = run.start_and_end("reward")
    values = run.metric_values("kl")
    early = values[: max(2, MIN_STEPS // 2)]
    if reward and early and max(early) > KL_END and reward[1] <= reward[0]:
        return f"kl is {max(early):.3g} after {len(early)} steps, and the reward has not risen"
    return None


def rate_too_low(run: RunEvidence) -> str | None:
    kl, reward = run.end_mean("kl"), run.metric_values("reward")
    norms = run.metric_values("grad_norm")
    if kl is None or run.steps < 2 * MIN_STEPS or updates_rounded_away(run):
        return None
    still = kl < SMALL_KL and bool(norms) and median(norms) > 0
    halves = reward[: len(reward) // 2], reward[len(reward) // 2 :]
    noise = pstdev(reward) / math.sqrt(max(1, len(reward) // 4))
    if not still or abs(fmean(halves[1]) - fmean(halves[0])) > 2 * noise:
        return None
    rate = run.metric_values("learning_rate")[-1:]
    return (
        f"after {run.steps} steps the policy is {kl:.2g} nats a token from where it began"
        f" (learning rate {rate[0] if rate else 0:g}), and the reward is level"
    )


def data_seen_twice(run: RunEvidence) -> str | None:
    if run.config_value("agent.kind") not in PROMPT_IS_THE_TASK:
        return None  # an environment gets the whole row: equal prompts may be different tasks
    rows: dict[tuple[int, str], set[int]] = defaultdict(set)
    prompts: set[str] = set()
    for group in run.groups():
        draw, text = group[0].get("draw"), shown_prompt(group[0])
        prompts.add(text)
        if draw in run.draw_examples:
            rows[run.draw_epochs[draw], text].add(run.draw_examples[draw])
    doubled = [text for (_, text), found in rows.items() if len(found) > 1]
    held_out = {shown_prompt(sample) for sample in run.held_out}
    both = held_out & prompts
    if doubled and len(doubled) >= DOUBLED_SHARE * len(rows):
        return (
            f"{len(doubled)} of {len(rows)} sampled prompts stand in several rows of the data, as"
            f" {doubled[0][:60]!r}"
        )
    if both and len(both) >= OVERLAP_SHARE * len(held_out):
        return f"{len(both)} of {len(held_out)} held-out prompts were trained on"
    return None


def ignored_completions(run: RunEvidence) -> str | None:
    """Scores that differ between prompts or draws, but not with what the completions say."""
    groups = [group for group in run.groups() if len(group) > 1]
    spreads, means, gaps, scores = [], [], [], []
    for group in groups:
        by_text: dict[object, list[float]] = defaultdict(list)
        for sample in group:
            if (score := finite_field(sample, "score")) is not None:
                by_text[whole_text(sample)].append(score)
                scores.append(score)
        flat = [score for found in by_text.values() for score in found]
        if len(flat) > 1 and len(by_text) > 1:
            spreads.append(pstdev(flat))
            means.append(fmean(flat))
        gaps += [pstdev(found) for found in by_text.values() if len(found) > 1]
    if len(scores) < MIN_COMPLETIONS or pstdev(scores) == 0:
        return None
    if len(means) > 3 and max(spreads) < 1e-9 and pstdev(means) > 0:
        return "every completion of a prompt has one score, and prompts differ"
    if len(gaps) >= 4 and fmean(gaps) > NOISE_GAP * pstdev(scores):
        return (
            f"equal completions of one prompt differ by {fmean(gaps):.3g} in their scores, all"
            f" completions by {pstdev(scores):.3g}"
        )
    return None


PathologyRule = Callable[[RunEvidence], str | None]
# Name in words -> (rule, which key to turn). The first that speaks heads the diagnosis.
PATHOLOGIES: dict[str, tuple[PathologyRule, str]] = {
    "updates are rounded away": (
        updates_rounded_away,
        "model.dtype=float32, distributed.master_weights=float32, or a higher train.learning_rate",
    ),
    "the reward ignores the completion": (
        ignored_completions,
        "the reward function: call it on two different completions (rloo samples RUN --best)",
    ),
    "tools or environments fail": (
        failing_calls,
        "agent.parser and the code of the tools: rloo samples RUN shows what they were asked",
    ),
    "learning rate too high": (
        rate_too_high,
        "a lower train.learning_rate, or fewer algorithm.num_iterations",
    ),
    "KL runs away": (kl_runaway, "a higher algorithm.beta, or a lower train.learning_rate"),
    "entropy collapse": (
        entropy_collapse,
        "a lower train.learning_rate, a higher algorithm.beta or generation.temperature",
    ),
    "the held-out score falls": (
        held_out_falling,
        "an earlier checkpoint (checkpoint.keep_last), a lower train.learning_rate, a higher"
        " algorithm.beta, or more prompts (data.path)",
    ),
    "one completion for all prompts": (
        one_completion,
        "the reward, if it pays for one text whatever was asked; a lower train.learning_rate or a"
        " higher algorithm.beta",
    ),
    "reward hacking by length": (
        length_hacking,
        "a reward that does not pay for length, reward=overlong beside it, or algorithm.beta",
    ),
    "one reward drowns the others": (reward_drowned, "reward.NAME.weight of the rewards"),
    "no spread within groups": (
        no_group_spread,
        "algorithm.num_generations, generation.temperature, or prompts of another difficulty",
    ),
    "duplicate completions": (
        duplicate_completions,
        "a higher generation.temperature, generation.top_p=1.0, top_k=0, or algorithm.beta",
    ),
    "all completions are truncated": (
        all_truncated,
        "generation.max_completion_length, or algorithm.missing_eos_penalty",
    ),
    "sampling is truncated": (
        truncated_sampling,
        "generation.return_sampling_mask=true; or top_p=1.0, top_k=0, min_p=null,"
        " repetition_penalty=1.0",
    ),
    "sampler and trainer disagree": (
        sampler_mismatch,
        "one model.dtype for both, and model.lm_head_fp32=true",
    ),
    "data is seen twice": (data_seen_twice, "data.path: take equal rows out"),
    "high variance": (
        high_variance,
        "more train.prompts_per_step or algorithm.num_generations",
    ),
    "learning rate too low": (rate_too_low, "a higher train.learning_rate"),
}
