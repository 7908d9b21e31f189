"""Finds the runs that are compared, and the held-out scores that all of them have."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rloo_cli.inspection import run_folders
from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.reporting import eval_lines


def find_compared_runs(patterns: Sequence[str]) -> list[Path]:
    """The folders of the runs that the arguments name, each once, in this order.

    An argument is a run's folder, its name under runs/, a folder with runs in it (one or two
    below), or a pattern (`runs/compare-*`). Raises ConfigError for one that names no run.
    """
    folders: dict[Path, Path] = {}
    for pattern in patterns:
        for folder in _runs_matching(pattern):
            folders.setdefault(folder.resolve(), folder)
    return [*folders.values()]


def _runs_matching(pattern: str) -> Iterator[Path]:
    root = run_folders.RUNS_ROOT
    if any(sign in pattern for sign in "*?["):
        paths = {*_matching_paths(Path(), pattern), *_matching_paths(root, pattern)}
        runs = [run for path in sorted(paths) for run in _runs_in(path)]
    else:
        runs = list(_runs_in(Path(pattern))) or list(_runs_in(root / pattern))
    if not runs:
        run_folders.find_run_folder(pattern, "compare")  # says which names are near
    yield from runs


def _matching_paths(root: Path, pattern: str) -> list[Path]:
    anchor = Path(pattern).anchor
    return sorted((Path(anchor) if anchor else root).glob(pattern[len(anchor) :]))


def _runs_in(path: Path) -> Iterator[Path]:
    """The folder itself if it is a run, else the training runs in it."""
    if _is_run(path):
        yield path
    elif path.is_dir():
        folders = [p.parent for deep in ("*", "*/*") for p in path.glob(f"{deep}/run.json")]
        yield from sorted(folder for folder in folders if _is_run(folder))


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def held_out_metrics(runs: Sequence[RunRecord]) -> list[str]:
    """The metrics of evaluations that every one of these runs has, headlines first."""
    names = [{name for line in run.eval_metrics for name in line} for run in runs]
    common = set.intersection(*names) - {"step"} if names else set()
    matches = [m for name in common if (m := eval_lines.HEADLINE_METRIC.fullmatch(name))]
    headlines = [m.string for m in matches if m["what"] == "reward"]
    return [*sorted(headlines, key=lambda n: (len(n), n)), *sorted(common - {*headlines})]
