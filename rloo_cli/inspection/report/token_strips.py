"""The strips of a report: a completion token by token, with numbers as colours.

A token's background is the gap between the policy's and the sampler's log-probability, the line
below it its advantage. The edge of the strip shows how many updates the sampler was behind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rloo_cli.inspection.diagnosis.evidence import RunEvidence
from rloo_cli.inspection.sample_files import SampleRecord
from rloo_cli.reporting.health.evidence import finite_field, prompt_text
from rloo_cli.reporting.panel import format_number
from rloo_cli.reporting.token_strip import TOKEN_FIELD
from rloo_cli.utils.console import show_control_characters

MAX_STRIPS, MAX_STRIP_TOKENS = 4, 320
MIN_GAP_SCALE = 0.02  # smallest gap in nats with full colour: less is rounding (docs/inspect.md)
MAX_PROMPT = 200  # characters
ORANGE, BLUE, GREEN, RED = "234,88,12", "37,99,235", "22,163,74", "220,38,38"
COLUMNS = ("logp", "sampler_logp", "ref_logp", "advantage")


@dataclass(frozen=True)
class ShownToken:
    """One token: its text, its colours as CSS, and its numbers as text."""

    text: str
    style: str
    tooltip: str


@dataclass(frozen=True)
class TokenStrip:
    """One completion token by token."""

    title: str
    prompt: str
    figures: str
    lag: int
    lag_colour: str
    gap_scale: float  # nats of the full colour
    tokens: list[ShownToken] = field(default_factory=list)
    left_out: int = 0  # tokens after the last shown one


def token_strips(run: RunEvidence) -> list[TokenStrip]:
    """The strips of the last step with token samples."""
    for step in sorted(run.samples, reverse=True):
        found = [s for s in run.samples[step] if _has_tokens(s)]
        if found:
            return [_token_strip(step, sample) for sample in found[:MAX_STRIPS]]
    return []


def _has_tokens(sample: SampleRecord) -> bool:
    tokens = sample.get(TOKEN_FIELD)
    text = tokens.get("text") if isinstance(tokens, dict) else None
    return isinstance(text, list) and bool(text)


def _token_strip(step: int, sample: SampleRecord) -> TokenStrip:
    tokens = sample[TOKEN_FIELD]
    texts = [str(text) for text in tokens["text"]]
    columns = {name: _numbers(tokens.get(name), len(texts)) for name in COLUMNS}
    whole = finite_field(sample, "advantage")
    gaps = [
        None if a is None or b is None else a - b
        for a, b in zip(columns["logp"], columns["sampler_logp"], strict=True)
    ]
    advantages = [whole if value is None else value for value in columns["advantage"]]
    gap_scale = max([MIN_GAP_SCALE, *(abs(gap) for gap in gaps if gap is not None)])
    scale = max([1e-9, *(abs(value) for value in advantages if value is not None)])
    lags = _numbers(tokens.get("lags"), len(texts))
    lag = tokens["lag"] if isinstance(tokens.get("lag"), int) else 0
    shown = [
        ShownToken(
            _visible_token(text),
            _token_style(gap, gap_scale, advantage, scale),
            _token_words(gap, advantage, {name: column[i] for name, column in columns.items()})
            + ("" if lags[i] is None else f", lag {lags[i]:.0f}"),
        )
        for i, (text, gap, advantage) in enumerate(zip(texts, gaps, advantages, strict=True))
    ]
    figures = [("score", sample.get("score")), ("advantage", whole), ("kl", sample.get("kl"))]
    said = [f"{k} {format_number(v)}" for k, v in figures if isinstance(v, int | float)]
    return TokenStrip(
        title=f"step {step}, draw {sample.get('draw', '?')}, completion {sample.get('k', '?')}",
        prompt=show_control_characters(prompt_text(sample)[-MAX_PROMPT:]),
        figures=" · ".join(said),
        lag=lag,
        lag_colour=GREEN if lag <= 0 else "217,119,6" if lag <= 2 else RED,
        gap_scale=gap_scale,
        tokens=shown[:MAX_STRIP_TOKENS],
        left_out=max(0, len(shown) - MAX_STRIP_TOKENS),
    )


def _numbers(values: object, count: int) -> list[float | None]:
    """This many numbers; None for missing ones."""
    found = values if isinstance(values, list) else []
    usable = [
        float(v) if isinstance(v, int | float) and math.isfinite(v) else None for v in found[:count]
    ]
    return [*usable, *[None] * (count - len(usable))]


def _visible_token(text: str) -> str:
    """A token's text with visible spaces and line breaks."""
    return show_control_characters(text.replace("\n", "⏎")).replace(" ", "·") or "∅"


def _token_style(gap: float | None, gap_scale: float, advantage: float | None, scale: float) -> str:
    parts = []
    if gap:
        parts.append(f"background:rgba({ORANGE if gap > 0 else BLUE},{_alpha(gap, gap_scale)})")
    if advantage:
        colour = f"rgba({GREEN if advantage > 0 else RED},{_alpha(advantage, scale)})"
        parts.append(f"border-bottom-color:{colour}")
    return ";".join(parts)


def _alpha(value: float, scale: float) -> str:
    return f"{min(1.0, abs(value) / scale):.2f}"


def _token_words(
    gap: float | None, advantage: float | None, numbers: dict[str, float | None]
) -> str:
    named: Sequence[tuple[str, float | None]] = (
        ("policy", numbers["logp"]), ("sampler", numbers["sampler_logp"]), ("gap", gap),
        ("reference", numbers["ref_logp"]), ("advantage", advantage),
    )  # fmt: skip
    return ", ".join(f"{name} {value:.4g}" for name, value in named if value is not None)
