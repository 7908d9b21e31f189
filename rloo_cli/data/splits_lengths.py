"""How long the prompts are, in one line: a histogram, the median, and where they are cut."""

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 16  # bars at most


def line(lengths: Sequence[int], limits: Sequence[int] = ()) -> str:
    """`prompt tokens: 12 |▁▃▇▅▂| 498, median 214, 95 % up to 430`, of equally wide bars.

    `limits`: the most tokens a prompt may have. Where some have more, it says how many.
    """
    low, high = min(lengths), max(lengths)
    ordered = sorted(lengths)
    told = f"prompt tokens: {low} |{_bars(ordered)}| {high}, median {_share(ordered, 0.5)}, "
    told += f"95 % up to {_share(ordered, 0.95)}"
    over = sum(n > min(limits) for n in lengths) if limits else 0
    return told + (f"; {over} over {' or '.join(map(str, limits))}" if over else "")


def _share(ordered: Sequence[int], share: float) -> int:
    """The least length that at least this share of the prompts does not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _bars(ordered: Sequence[int]) -> str:
    low, span = ordered[0], ordered[-1] - ordered[0] + 1
    width = min(WIDTH, span)
    counts = [0] * width
    for n in ordered:
        counts[(n - low) * width // span] += 1
    most = max(counts)
    # A bar that is not empty can be seen.
    return "".join(" " if not c else BARS[(c * len(BARS) - 1) // most] for c in counts)
