"""Finds the folder of a run by its path or its name, and lists existing runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import read_json

RUNS_ROOT = Path("runs")  # default root of runs
RUN_FILES = ("run.json", "metrics.jsonl", "config.yaml")  # any of them marks a run's folder


def list_run_names() -> list[str]:
    """The runs under runs/, one or two folders down (runs/debug/smoke is `debug/smoke`)."""
    found = [p.parent for deep in ("*", "*/*") for p in RUNS_ROOT.glob(f"{deep}/{RUN_FILES[0]}")]
    return sorted(str(p.relative_to(RUNS_ROOT)) for p in found)


def find_run_folder(name_or_path: str | None, verb: str) -> Path:
    """The folder of a run, named by its path or by its name under runs/.

    Raises ConfigError, which names the nearest existing run.
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
    there = f"known runs: {', '.join(known[:20])}" if known else f"no runs in {RUNS_ROOT}/"
    if name_or_path is None:
        refuse("command line", f"rloo {verb} needs a run", fix, there)
    looked = " or ".join(str(folder) for folder in here)
    why = f"looked at {looked}: no {RUN_FILES[0]} there\n{there}"
    refuse("command line", f"run {name_or_path!r} not found", fix, why)


def find_compared_runs(patterns: Sequence[str]) -> list[Path]:
    """The folders of the runs that the arguments name, each once, in this order.

    An argument is a run's folder or name under runs/, a sweep's, a folder with runs in it (one or
    two below), or a pattern (`runs/compare-*`). Raises ConfigError for an argument without a run.
    """
    folders: dict[Path, Path] = {}
    for pattern in patterns:
        for folder in _runs_matching(pattern):
            folders.setdefault(folder.resolve(), folder)
    return [*folders.values()]


def _runs_matching(pattern: str) -> Iterator[Path]:
    root = RUNS_ROOT
    if any(sign in pattern for sign in "*?["):
        paths = {*_matching_paths(Path(), pattern), *_matching_paths(root, pattern)}
        runs = [run for path in sorted(paths) for run in _runs_in(path)]
    else:
        runs = list(_runs_in(Path(pattern))) or list(_runs_in(root / pattern))
    if not runs:
        find_run_folder(pattern, "compare")  # reports similar names
    yield from runs


def _matching_paths(root: Path, pattern: str) -> list[Path]:
    anchor = Path(pattern).anchor
    return sorted((Path(anchor) if anchor else root).glob(pattern[len(anchor) :]))


def _runs_in(path: Path) -> Iterator[Path]:
    """The folder itself if it is a run, else the training runs in it; a sweep's lie beside it."""
    if _is_run(path):
        yield path
    elif path.is_dir():
        names = [trial["name"] for trial in read_json(path / "sweep.json").get("members", [])]
        found = [p.parent for deep in ("*", "*/*") for p in path.glob(f"{deep}/run.json")]
        folders = [path.parent / name for name in names] or found
        yield from sorted(folder for folder in folders if _is_run(folder))


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()
