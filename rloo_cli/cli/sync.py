"""`rloo sync RUN TRACKER`: send all of a run's metrics to a tracker, now.

    rloo sync RUN wandb          also tensorboard, trackio, mlflow, swanlab
    --project NAME               instead of the run's logging.tracker_project
    --json                       how many lines were sent, and where they are

For a run that was trained without it, or whose lines did not all fit. It may be repeated: it goes
on under the same id, and what the tracker has is not sent again. Exits with 10 if it refuses.
"""

import json
from pathlib import Path

from rloo_cli.cli.run_arguments import RunArgumentParser
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.inspection.run_record import inspect_run_folder
from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.reporting.trackers import remember_tracker_run, tracker_about
from rloo_cli.reporting.trackers.writers import TRACKERS, line_scalars
from rloo_cli.utils.errors import ConfigError, Problem, TrackerError
from rloo_cli.utils.files import JsonObject

USAGE = "rloo sync RUN TRACKER [--project NAME] [--json]"


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError (no run, no metrics, no such tracker), TrackerError."""
    parser = RunArgumentParser("sync", USAGE)
    parser.add_argument("tracker", nargs="?", metavar="TRACKER")
    parser.add_argument("--project")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(args)
    if options.tracker not in TRACKERS:
        what = f"there is no tracker {options.tracker!r}" if options.tracker else "which tracker?"
        why = f"trackers: {', '.join(TRACKERS)}"
        raise ConfigError(Problem(what, "command line", why, "rloo sync RUN tensorboard"))
    folder = find_run_folder(options.run, "sync")
    told = _send_all(folder, options.tracker, options.project)
    if options.json:
        print(json.dumps(told, indent=2))
    else:
        where = told["url"] or told["id"]
        print(
            f"{told['sent']} lines sent to {options.tracker}, {told['known']} were there: {where}"
        )
    return 0


def _send_all(folder: Path, name: str, project: str | None) -> JsonObject:
    record = inspect_run_folder(folder)
    lines = record.metrics_lines
    if not lines:
        fix = f"wait for its first step; rloo doctor {folder} says what keeps it"
        why = "its first step, or its first evaluation, has not ended yet"
        raise ConfigError(Problem(f"{folder} has no metrics to send", "command line", why, fix))
    logging = record.config.get("logging")
    project = project or (logging.get("tracker_project") if isinstance(logging, dict) else None)
    about = tracker_about(folder, [name], project, folder.name, record.config)
    writer = TRACKERS[name](about)
    try:
        writer.start()
        names = {_first_metric(line)[1] for line in lines}
        known = writer.known_metrics(names) if about["ids"] else set()
        new = [line for line in lines if _first_metric(line) not in known]
        for line in new:
            writer.log(int(line["step"]), line_scalars(line))
        writer.finish()
    except ImportError as error:
        fix = f"pip install {TRACKERS[name].package}"
        raise TrackerError(
            Problem(f"{name}: its package is missing", "this machine", str(error), fix)
        ) from None
    except Exception as error:  # a client may raise anything
        why = f"{type(error).__name__}: {error}"
        what, fix = f"{name} does not take the run", "see to its login and network, then try again"
        raise TrackerError(Problem(what, "command line", why, fix)) from error
    remember_tracker_run(folder, name, writer.run_id, writer.url)
    return {
        "tracker": name, "id": writer.run_id, "url": writer.url, "sent": len(new),
        "known": len(lines) - len(new),
    }  # fmt: skip


def _first_metric(line: MetricsMapping) -> tuple[int, str]:
    """A line's step and the first of its metrics, by which it is found again at a tracker."""
    return int(line["step"]), next(iter(line_scalars(line)), "")
