"""One class for each tracker, over the tracker's own client, which is imported where it starts.

A resumed run goes on under the id that the tracker gave it. Steps that a resumed run makes again
have the same numbers: they are written again or left out, as the client allows.
"""

import re
import time
from pathlib import Path
from typing import Any, ClassVar

from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.utils.files import JsonObject


def line_scalars(line: MetricsMapping) -> dict[str, float]:
    """The numbers of a line of metrics, without its step."""
    return {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    }


class TrackerWriter:
    """What the process of the trackers asks of each. `about` is `tracker_about`'s."""

    package: ClassVar[str]

    def __init__(self, about: JsonObject):
        self.about = about
        self.folder = Path(about["folder"])
        self.project, self.name = str(about["project"]), str(about["name"])
        self.known_id: str | None = about.get("ids", {}).get(self.tracker_name())
        self.run_id: str | None = self.known_id
        self.url: str | None = None

    @classmethod
    def tracker_name(cls) -> str:
        """Its name in logging.trackers."""
        return next(name for name, made in TRACKERS.items() if made is cls)

    def start(self) -> None:
        """Open the run at the tracker. Raises ImportError without its package."""
        raise NotImplementedError

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line of metrics."""
        raise NotImplementedError

    def finish(self) -> None:
        """Send what is left."""

    def known_metrics(self, names: set[str]) -> set[tuple[int, str]]:
        """(step, metric) of what the tracker has of these metrics; empty where it drops or replaces
        by itself what it is sent again."""
        return set()


class TensorboardWriter(TrackerWriter):
    """Event files in RUN/tensorboard."""

    package = "tensorboard"

    def start(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event_pb2, self.summary_pb2 = event_pb2, summary_pb2
        self.writer = EventFileWriter(str(self.folder / "tensorboard"))
        self.run_id, self.last_step = self.name, -1

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step < self.last_step or (self.last_step < 0 and self.known_id):
            # What an earlier file says of this step and of later ones is made again.
            status = self.event_pb2.SessionLog(status=self.event_pb2.SessionLog.START)
            self.writer.add_event(
                self.event_pb2.Event(wall_time=time.time(), step=step, session_log=status)
            )
        self.last_step = step
        values = [
            self.summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
        ]
        summary = self.summary_pb2.Summary(value=values)
        self.writer.add_event(
            self.event_pb2.Event(wall_time=time.time(), step=step, summary=summary)
        )

    def finish(self) -> None:
        self.writer.close()


class WandbWriter(TrackerWriter):
    """Weights & Biases; offline with WANDB_MODE=offline."""

    package = "wandb"

    def start(self) -> None:
        import wandb

        self.run = wandb.init(
            project=self.project, name=self.name, config=self.about["config"],
            id=self.known_id, resume="allow" if self.known_id else None, dir=str(self.folder),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self.run_id, self.url = self.run.id, getattr(self.run, "url", None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def finish(self) -> None:
        self.run.finish()


class TrackioWriter(TrackerWriter):
    """trackio, in TRACKIO_DIR or its cache."""

    package = "trackio"

    def start(self) -> None:
        import trackio

        self.trackio: Any = trackio
        trackio.init(
            project=self.project, name=self.name, config=self.about["config"],
            resume="allow" if self.known_id else "never",
        )  # fmt: skip
        self.run_id = self.name

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.trackio.log(metrics, step=step)

    def finish(self) -> None:
        self.trackio.finish()

    def known_metrics(self, names: set[str]) -> set[tuple[int, str]]:
        from trackio.sqlite_storage import SQLiteStorage

        logs = SQLiteStorage.get_logs(self.project, self.name)
        return {(int(log["step"]), name) for log in logs for name in names & log.keys()}


class MlflowWriter(TrackerWriter):
    """mlflow, at MLFLOW_TRACKING_URI or in its own folder."""

    package = "mlflow"

    def start(self) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(self.project)
        run = mlflow.start_run(run_id=self.known_id, run_name=self.name)
        self.run_id = run.info.run_id
        if not self.known_id:
            mlflow.log_dict(self.about["config"], "config.json")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        named = {self._mlflow_name(name): value for name, value in metrics.items()}
        self.mlflow.log_metrics(named, step=step)

    def finish(self) -> None:
        self.mlflow.end_run()

    def known_metrics(self, names: set[str]) -> set[tuple[int, str]]:
        client, known = self.mlflow.MlflowClient(), set()
        for name in names:
            history = client.get_metric_history(self.run_id, self._mlflow_name(name))
            known |= {(int(point.step), name) for point in history}
        return known

    @staticmethod
    def _mlflow_name(name: str) -> str:
        return re.sub(r"[^\w\-./: ]", "_", name)  # what mlflow takes in a name


class SwanlabWriter(TrackerWriter):
    """SwanLab; local with SWANLAB_MODE=local."""

    package = "swanlab"

    def start(self) -> None:
        import swanlab

        self.swanlab: Any = swanlab
        given: JsonObject = {"id": self.known_id, "resume": "allow"} if self.known_id else {}
        run = swanlab.init(
            project=self.project, experiment_name=self.name, config=self.about["config"],
            logdir=str(self.folder / "swanlab"), **given,
        )  # fmt: skip
        public = getattr(run, "public", None)
        self.run_id = str(getattr(public, "run_id", None) or getattr(run, "id", None) or self.name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.swanlab.log(metrics, step=step)

    def finish(self) -> None:
        self.swanlab.finish()


TRACKERS: dict[str, type[TrackerWriter]] = {
    "tensorboard": TensorboardWriter,
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
    "mlflow": MlflowWriter,
    "swanlab": SwanlabWriter,
}
