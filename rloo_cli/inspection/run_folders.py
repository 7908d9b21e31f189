"""Finds the folder of a run by its path or its name, and lists the runs there are."""

from pathlib import Path

from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import ConfigError, Problem

RUNS_ROOT = Path("runs")  # where a run is if its config does not say otherwise
RUN_FILES = ("run.json", "metrics.jsonl", "config.yaml")  # any of them makes a folder a run's


def list_run_names() -> list[str]:
    """The runs under runs/, one or two folders down (runs/debug/smoke is `debug/smoke`)."""
    found = [p.parent for deep in ("*", "*/*") for p in RUNS_ROOT.glob(f"{deep}/{RUN_FILES[0]}")]
    return sorted(str(p.relative_to(RUNS_ROOT)) for p in found)


def find_run_folder(name_or_path: str | None, verb: str) -> Path:
    """The folder of a run, named by its path or by its name under runs/.

    Raises ConfigError, which names the nearest run there is.
    """
    here = [Path(name_or_path), RUNS_ROOT / name_or_path] if name_or_path else []
    for folder in here:
        if any((folder / sign).is_file() for sign in RUN_FILES):
            return folder
    known = list_run_names()
    close = (
        nearest_names(name_or_path.removeprefix(f"{RUNS_ROOT}/").strip("/"), known)
        if name_or_path
        else known
    )
    fix = f"rloo {verb} {close[0] if close else 'RUN'}"
    there = f"runs here: {', '.join(known[:20])}" if known else f"there is no run in {RUNS_ROOT}/"
    if name_or_path is None:
        raise ConfigError(Problem(f"rloo {verb} needs a run", "command line", there, fix))
    looked = " or ".join(str(folder) for folder in here)
    why = f"looked at {looked}: no {RUN_FILES[0]} there\n{there}"
    raise ConfigError(Problem(f"there is no run {name_or_path!r}", "command line", why, fix))
