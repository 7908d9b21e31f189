"""`rloo sync RUN TRACKER`: send all of a run's metrics to a tracker.

For a run trained without the tracker, or whose lines were not all sent. It can be repeated: it uses
the same run id, and skips lines that the tracker has. Exits with 10 if the tracker refuses the run.
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

SEND_LIMIT_S = 24 * 3600.0  # for all lines; each client call has its own limit


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError (unknown run or tracker, no metrics), TrackerError."""
    options = parse_verb("sync", args)
    if options.tracker not in TRACKERS:
        fix = "rloo sync RUN NAME"
        refuse_unknown_name("tracker", options.tracker, TRACKERS, fix, "rloo sync RUN tensorboard")
    folder = find_run_folder(options.run, "sync")
    sent = _send_all(folder, options.tracker, options.project)
    if options.json:
        print(json.dumps(sent, indent=2))
    else:
        where = sent["url"] or sent["id"]
        print(
            f"{sent['sent']} lines sent to {options.tracker}, {sent['known']} known there: {where}"
        )
    return 0


def _send_all(folder: Path, name: str, project: str | None) -> JsonObject:
    record = inspect_run_folder(folder)
    lines = record.metrics_lines
    if not lines:
        fix = f"wait for its first step; rloo doctor {folder} shows why it waits"
        why = "it has not finished its first step or evaluation"
        refuse("command line", f"{folder} has no metrics to send", fix, why)
    logging = record.config.get("logging")
    project = project or (logging.get("tracker_project") if isinstance(logging, dict) else None)
    about = tracker_about(folder, [name], project, folder.name, record.config)
    client = TrackerClient(about, lambda note: print(note, file=sys.stderr))
    client.start(lines)
    client.close(SEND_LIMIT_S)
    if name in client.failed:
        what, fix = f"{name} does not accept the run", "check its login and network, then try again"
        refuse("command line", what, fix, client.failed[name], error=TrackerError)
    (tracker,) = client.trackers
    opened = client.ready[name]  # run.json may be damaged and lack it
    return {
        "tracker": name, "id": opened["id"], "url": opened["url"], "sent": tracker.num_sent,
        "known": len(lines) - tracker.num_sent,
    }  # fmt: skip
