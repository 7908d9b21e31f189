"""The trackers of accelerate.tracking: how each opens our run, and the run's id there.

A resumed run continues under the id that the tracker gave it, and is sent from its first line:
after a kill a tracker may lack some. What it has is replaced or skipped, as the client allows.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.utils.files import JsonObject

# Variables by which accelerate detects one of several processes, and waits for the others.
RANK_VARIABLES = (
    "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE",
)  # fmt: skip


@dataclass(frozen=True)
class RunAbout:
    """The data that a tracker gets about a run."""

    folder: Path
    project: str
    name: str
    config: JsonObject  # without secrets
    known_id: str | None  # of a run that it has already


@dataclass(frozen=True)
class TrackerKind:
    """One class of accelerate.tracking: its package, its arguments, and the id of its run."""

    package: str
    arguments: Callable[[RunAbout], JsonObject]
    run_id: Callable[[Any, RunAbout], str] = lambda client, about: about.name
    has_url: bool = False  # the run has a web page
    takes_config: bool = False  # by store_init_configuration; else as an argument
    known_metrics: "Callable[[RunAbout, set[str]], set[tuple[int, str]]] | None" = None
    metric_name: Callable[[str], str] = str  # converts to a valid name


def line_scalars(line: MetricsMapping) -> dict[str, float]:
    """The numbers of a line of metrics, without its step."""
    return {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    }


def first_metric(line: MetricsMapping) -> tuple[int, str]:
    """A line's step and the first of its metrics, which identify it at a tracker."""
    return int(line["step"]), next(iter(line_scalars(line)), "")


class TrackerRun:
    """A run at one tracker. Creating it opens the run. Raises ImportError without its package.

    `known_metrics(names)`: (step, metric) of those of these metrics that it has; empty if it drops
    or replaces repeated lines itself.
    """

    def __init__(self, name: str, about: RunAbout):
        from accelerate.state import PartialState  # lazy: accelerate imports torch
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        for variable in RANK_VARIABLES:
            os.environ.pop(variable, None)
        PartialState(cpu=True)  # accelerate's loggers need it; without these it joins no other rank
        self.kind, self.about = TRACKERS[name], about
        self.tracker: Any = LOGGER_TYPE_TO_CLASS[name](**self.kind.arguments(about))
        self.tracker.start()
        self.run_id = self.kind.run_id(self.tracker.tracker, about)
        client = self.tracker.tracker
        self.url: str | None = getattr(client, "url", None) if self.kind.has_url else None
        if self.kind.takes_config and not about.known_id:
            self.tracker.store_init_configuration(_flat_keys(about.config))

    def log(self, line: MetricsMapping) -> None:
        """Write one line of metrics."""
        values = {self.kind.metric_name(n): value for n, value in line_scalars(line).items()}
        self.tracker.log(values, step=int(line["step"]))

    def finish(self) -> None:
        """Send the rest."""
        self.tracker.finish()

    def known_metrics(self, names: set[str]) -> set[tuple[int, str]]:
        """(step, metric) of those of these metrics that the tracker has already."""
        if self.kind.known_metrics is None or not self.about.known_id:
            return set()
        return self.kind.known_metrics(self.about, names)


def _flat_keys(values: JsonObject, prefix: str = "") -> JsonObject:
    """Nested sections as `section.key`: most trackers keep a flat table of parameters."""
    flat: JsonObject = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat_keys(value, f"{prefix}{key}.")
        else:
            is_plain = isinstance(value, bool | int | float | str)
            flat[prefix + key] = value if is_plain else str(value)
    return flat


def _tensorboard(about: RunAbout) -> JsonObject:
    """Event files in RUN/tensorboard; an earlier file's steps are written again, and replaced."""
    purge_step = 0 if about.known_id else None
    named = {"run_name": "tensorboard", "logging_dir": str(about.folder)}
    return named | {"purge_step": purge_step}


def _wandb(about: RunAbout) -> JsonObject:
    """Weights & Biases; offline with WANDB_MODE=offline."""
    return {
        "run_name": about.project, "name": about.name, "config": about.config,
        "id": about.known_id, "resume": "allow" if about.known_id else None,
        "dir": str(about.folder), "settings": {"console": "off", "silent": True},
    }  # fmt: skip


def _trackio(about: RunAbout) -> JsonObject:
    """trackio, in TRACKIO_DIR or its cache."""
    resume = "allow" if about.known_id else "never"
    named = {"run_name": about.project, "name": about.name}
    return named | {"config": about.config, "resume": resume}


def _mlflow(about: RunAbout) -> JsonObject:
    """mlflow, at MLFLOW_TRACKING_URI or in its own folder."""
    return {"experiment_name": about.project, "run_name": about.name, "run_id": about.known_id}


def _swanlab(about: RunAbout) -> JsonObject:
    """SwanLab; local with SWANLAB_MODE=local."""
    known = {"id": about.known_id, "resume": "allow"} if about.known_id else {}
    named = {"run_name": about.project, "experiment_name": about.name, "config": about.config}
    return named | {"logdir": str(about.folder / "swanlab")} | known


def _comet(about: RunAbout) -> JsonObject:
    known = {"experiment_key": about.known_id, "mode": "get"} if about.known_id else {}
    return {"run_name": about.project} | known


def _aim(about: RunAbout) -> JsonObject:
    """Aim, in AIM_REPO or the folder .aim of RUN."""
    known = {"run_hash": about.known_id} if about.known_id else {}
    named = {"run_name": about.name, "experiment": about.project}
    return named | {"logging_dir": str(about.folder)} | known


def _clearml(about: RunAbout) -> JsonObject:
    named = {"run_name": about.project, "task_name": about.name}
    return named | {"continue_last_task": about.known_id or False}


def _dvclive(about: RunAbout) -> JsonObject:
    return {"dir": str(about.folder / "dvclive"), "resume": bool(about.known_id)}


def _swanlab_id(run: Any, about: RunAbout) -> str:
    public = getattr(run, "public", None)
    return str(getattr(public, "run_id", None) or getattr(run, "id", None) or about.name)


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-./: ]", "_", name)  # mlflow's allowed characters


def _trackio_metrics(about: RunAbout, names: set[str]) -> set[tuple[int, str]]:
    from trackio.sqlite_storage import SQLiteStorage  # lazy: a tracker's own package

    logs = SQLiteStorage.get_logs(about.project, about.name)
    return {(int(log["step"]), name) for log in logs for name in names & log.keys()}


def _mlflow_metrics(about: RunAbout, names: set[str]) -> set[tuple[int, str]]:
    from mlflow import MlflowClient  # lazy: a tracker's own package

    client, known = MlflowClient(), set()
    for name in names:
        history = client.get_metric_history(about.known_id, _mlflow_name(name))
        known |= {(int(point.step), name) for point in history}
    return known


TRACKERS = {
    "tensorboard": TrackerKind("tensorboard", _tensorboard),
    "wandb": TrackerKind("wandb", _wandb, lambda run, _: str(run.id), has_url=True),
    "trackio": TrackerKind("trackio", _trackio, known_metrics=_trackio_metrics),
    "mlflow": TrackerKind(
        "mlflow",
        _mlflow,
        lambda run, _: str(run.info.run_id),
        takes_config=True,
        known_metrics=_mlflow_metrics,
        metric_name=_mlflow_name,
    ),
    "swanlab": TrackerKind("swanlab", _swanlab, _swanlab_id),
    "comet_ml": TrackerKind("comet_ml", _comet, lambda run, _: str(run.get_key()), True, True),
    "aim": TrackerKind("aim", _aim, lambda run, _: str(run.hash), takes_config=True),
    "clearml": TrackerKind("clearml", _clearml, lambda task, _: str(task.id), takes_config=True),
    "dvclive": TrackerKind("dvclive", _dvclive, takes_config=True),
}
