"""`rloo sync RUN TRACKER`: send all of a run's metrics to a tracker, now.

For a run that was trained without it, or whose lines did not all fit. It may be repeated: it goes
on under the same id, and what the tracker has is not sent again. Exits with 10 if it refuses.
"""

import json
import sys
from pathlib import Path

from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.inspection.run_record import inspect_run_folder
from rloo_cli.reporting.trackers import TrackerClient, tracker_about
from rloo_cli.reporting.trackers.kinds import TRACKERS
from rloo_cli.utils.errors import TrackerError, refuse
from rloo_cli.utils.files import JsonObject

SEND_LIMIT_S = 24 * 3600.0  # of all lines; one call of a client has a limit of its own


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError (no run, no metrics, no such tracker), TrackerError."""
    options = parse_verb("sync", args)
    if options.tracker not in TRACKERS:
        fix = "rloo sync RUN NAME"
        refuse_unknown_name("tracker", options.tracker, TRACKERS, fix, "rloo sync RUN tensorboard")
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
        refuse("command line", f"{folder} has no metrics to send", fix, why)
    logging = record.config.get("logging")
    project = project or (logging.get("tracker_project") if isinstance(logging, dict) else None)
    about = tracker_about(folder, [name], project, folder.name, record.config)
    client = TrackerClient(about, lambda note: print(note, file=sys.stderr))
    client.start(lines)
    client.close(SEND_LIMIT_S)
    if name in client.failed:
        what, fix = f"{name} does not take the run", "see to its login and network, then try again"
        refuse("command line", what, fix, client.failed[name], error=TrackerError)
    (tracker,) = client.trackers
    opened = client.ready[name]  # run.json may be damaged, and not say it
    return {
        "tracker": name, "id": opened["id"], "url": opened["url"], "sent": tracker.num_sent,
        "known": len(lines) - tracker.num_sent,
    }  # fmt: skip
