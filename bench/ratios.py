"""How much longer one row's steps took than another's. No torch: the page is made with it."""

from statistics import median

from results import Row


def ratio(theirs: Row, ours: Row, kind: str, clock: str = "s") -> tuple[float, float, float]:
    """Seconds of `theirs` by those of `ours`: of medians, least, most.

    `kind`: step or train. `clock`: s = by the wall, cpu_s = the process's own. Least and most are
    of single rounds: in one round both ran within seconds of each other, so a machine that slows
    down for a while slows both.
    """
    name = f"{clock}_{kind}s"
    pairs = list(zip(theirs[name], ours[name], strict=False))
    each = [a / b for a, b in pairs]
    middle = median(a for a, _ in pairs) / median(b for _, b in pairs)
    return middle, min(each), max(each)


def crowded(row: Row) -> bool:
    """More wanted to run than there are cores: the wall's seconds are not to be quoted."""
    return bool(row["loadavg"] > (row["cores"] or 1))
