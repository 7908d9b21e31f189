"""Rules over the samples of a whole run: each returns a description with figures, or None.

Thresholds were set on short runs that really have the fault. A rule without its samples is
silent.
"""

from collections import defaultdict
from statistics import fmean, pstdev

from rloo_cli.reporting.health.evidence import (
    Evidence,
    episode_turns,
    finite_field,
    group_pairs,
    pair_correlation,
    shown_prompt,
    whole_text,
)
from rloo_cli.utils.files import JsonObject

MIN_COMPLETIONS = 24  # before a correlation over completions counts
LENGTH_CORRELATION = 0.6  # of score and length within groups: above it the length is the reward
LENGTH_GROWTH = 1.25  # of the mean length, or its inverse, from the first quarter to the last
DROWNING_SHARE = 0.97  # of the score's variance within groups, from one of several rewards
DROWNED_SHARE = 0.25  # of its completions that a drowned reward still distinguishes
DOUBLED_SHARE = 0.05  # of an epoch's draws that repeat a prompt from another row
OVERLAP_SHARE = 0.05  # of held-out prompts that were trained on
NOISE_GAP = 0.25  # of the scores' spread: the gap between equal completions
ALIKE_SHARE = 0.5  # of the groups: all completions equal, and not the best
PROMPT_IS_THE_TASK = (None, "tools")  # agents for which equal prompts are the same task


def ignored_completions(run: Evidence) -> str | None:
    """Scores that differ between prompts or draws, but not with the completion's text."""
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
        return "all completions of a prompt have the same score, and prompts differ"
    if len(gaps) >= 4 and fmean(gaps) > NOISE_GAP * pstdev(scores):
        return (
            f"equal completions of one prompt differ by {fmean(gaps):.3g} in their scores, all"
            f" completions by {pstdev(scores):.3g}"
        )
    return None


def length_hacking(run: Evidence) -> str | None:
    """The score follows the length, and the lengths have moved."""
    lengths = run.start_and_end("completions/mean_length")
    turns = run.start_and_end("agent/turns")
    if lengths is not None and turns is not None:  # an agent may have to learn to use more turns
        lengths = lengths[0] / max(turns[0], 1.0), lengths[1] / max(turns[1], 1.0)
    alike = (part for group in run.groups() for part in _split_by_turns(group))
    pairs = group_pairs(alike, "score", "completion_length")
    correlation = pair_correlation(pairs) if len(pairs) >= MIN_COMPLETIONS else None
    if lengths is None or correlation is None:
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


def _split_by_turns(group: list[JsonObject]) -> list[list[JsonObject]]:
    """The group's completions by their number of turns; without an agent they have none."""
    parts: dict[int, list[JsonObject]] = defaultdict(list)
    for sample in group:
        parts[len(episode_turns(sample))].append(sample)
    return [*parts.values()]


def reward_drowned(run: Evidence) -> str | None:
    """One of several rewards dominates, and another one's distinctions have no effect."""
    rewards = run.config_value("reward")
    weights = {
        name: float(entry.get("weight", 1.0))
        for name, entry in (rewards if isinstance(rewards, dict) else {}).items()
        if isinstance(entry, dict) and isinstance(entry.get("weight", 1.0), int | float)
    }
    used = {name for name, weight in weights.items() if weight}
    if len(used) < 2:
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
        f"{largest} has {spread[largest] / total:.1%} of the score's variance within groups;"
        f" {' and '.join(drowned)}, which also distinguishes completions, has no effect"
    )


def duplicate_completions(run: Evidence) -> str | None:
    """All siblings are one text that is not the best, so no sibling can show a better one."""
    scores = run.scores()
    if not scores or run.has_mastered():
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
        f"in {alike} of the last {len(groups)} groups all completions are the same text,"
        " not the best one: no sibling can show a better one"
    )


def data_seen_twice(run: Evidence) -> str | None:
    """A prompt occurs in several rows, or is both held out and trained on."""
    if run.config_value("agent.kind") not in PROMPT_IS_THE_TASK:
        return None  # environments get the whole row: equal prompts may be different tasks
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
            f"{len(doubled)} of {len(rows)} sampled prompts occur in several rows of the data,"
            f" such as {doubled[0][:60]!r}"
        )
    if both and len(both) >= OVERLAP_SHARE * len(held_out):
        return f"{len(both)} of {len(held_out)} held-out prompts were trained on"
    return None
