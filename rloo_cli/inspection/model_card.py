"""The model card of a run, for a hub: model, method, data and scores.

It contains no local path and no user name: a local path is shown as "(local)".
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from rloo_cli.inspection.run_record import RunRecord
from rloo_cli.reporting.eval_lines import headline_metrics, interval_text
from rloo_cli.reporting.panel import format_number
from rloo_cli.utils import redact
from rloo_cli.utils.files import JsonObject, read_json

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # of a model or a data set
LOCAL = "(local)"
SHOWN_KEYS = (  # of the config, in the table of the card
    "model.path", "data.path", "data.name", "algorithm.name", "algorithm.num_generations",
    "algorithm.beta", "generation.backend", "generation.max_completion_length",
    "train.prompts_per_step", "train.learning_rate", "train.lr_scheduler", "max_steps", "seed",
)  # fmt: skip


def model_card(record: RunRecord, dataset: str | None = None) -> str:
    """The card as Markdown, with the header for hubs.

    `dataset`: the hub's name of the data; None = data.path, if that is one.
    """
    header: JsonObject = {
        "library_name": "transformers",
        "tags": ["rloo", "reinforcement-learning"],
    }
    model, data = _config_value(record, "model.path"), _config_value(record, "data.path")
    if HUB_NAME.fullmatch(str(model)) and not Path(str(model)).exists():
        header["base_model"] = model
    if dataset is not None:
        header["datasets"] = [dataset]
    elif HUB_NAME.fullmatch(str(data)) and not Path(str(data)).exists():
        header["datasets"] = [data]
    algorithm = str(_config_value(record, "algorithm.name") or "rloo")
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {record.config.get('name') or record.name}",
        f"Trained by reinforcement learning with `{algorithm}`, {record.last_step} steps, by rloo.",
        *_held_out_part(record),
        "## How",
        *_command_part(record),
        _table(("key", "value"), [(k, v) for k in SHOWN_KEYS if (v := _shown(record, k))]),
        *_reward_part(record),
        "## Versions",
        _versions(record),
    ]
    return redact.redact_text("\n\n".join(part for part in parts if part) + "\n")


def _config_value(record: RunRecord, key: str) -> object:
    value: object = record.config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _shown(record: RunRecord, key: str) -> str:
    value = _config_value(record, key)
    return "" if value is None else public_text(str(value))


def public_text(text: str) -> str:
    """A value for publication: local paths are hidden."""
    if re.search(r"(^|[=:\s\[{,])(~|\.{0,2}/)", text) or Path(text).is_absolute():
        return re.sub(r"(^|(?<=[=:\s\[{,]))(~|\.{0,2}/)[^\s,\]}]*", LOCAL, text)
    return text


def _held_out_part(record: RunRecord) -> list[str]:
    lines = [line for line in record.eval_metrics if headline_metrics(line)]
    if not lines:
        return []
    rows = []
    for label, name in headline_metrics(lines[0]):
        first, last = lines[0].get(name), lines[-1].get(name)
        if isinstance(first, int | float) and isinstance(last, int | float):
            texts = (
                format_number(value) + interval_text(line, name)
                for value, line in ((first, lines[0]), (last, lines[-1]))
            )
            rows.append((label, *texts))
    steps = f"step {lines[0]['step']}", f"step {lines[-1]['step']}"
    return ["## Held-out scores", _table(("score", *steps), rows)] if rows else []


def _command_part(record: RunRecord) -> list[str]:
    path = record.folder / "overrides.txt"
    if not path.is_file():
        return []
    words = path.read_text(encoding="utf-8", errors="replace").split("\n")
    # The run's folder is local, and words with local paths are hidden.
    shown = [public_text(w) for w in words if w.strip() and not w.lstrip("+").startswith("root=")]
    return [f"```\nrloo train {' '.join(shown)}\n```"]


def _reward_part(record: RunRecord) -> list[str]:
    rewards = record.config.get("reward")
    if not isinstance(rewards, dict):
        return []
    rows = [
        (str(name), str(entry.get("type", name)), str(entry.get("weight", 1.0)))
        for name, entry in rewards.items()
        if isinstance(entry, dict)
    ]
    return [_table(("reward", "type", "weight"), rows)] if rows else []


def _versions(record: RunRecord) -> str:
    try:
        environment = read_json(record.folder / "env.json")
    except (OSError, ValueError, json.JSONDecodeError):
        return ""
    packages = environment.get("packages")
    rows = [("python", str(environment.get("python", "")))]
    rows += [(k, str(v)) for k, v in packages.items()] if isinstance(packages, dict) else []
    return _table(("package", "version"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in lines)
