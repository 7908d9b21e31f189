"""Holds what was read of an old run, before any of it is converted."""

from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject

MAX_FILE_BYTES = 256_000  # of a script or a config: it is read by several readers in turn


@dataclass
class OldRun:
    """Old settings by name, and how they were launched."""

    flags: JsonObject
    tool: str = ""  # trl, swift, or grpo and rloo if the command says only that
    method: str = ""  # the argument after the tool: rloo, grpo, rlhf, sft ...
    script: str = ""  # file name of the training script
    file: str = ""  # file name of the config
    kind: str = ""  # rloo or grpo, if a class in the script says so
    setting_format: str = "--{} {}"
    processes: int | None = None
    processes_from: str = ""
    nodes: int = 1  # machines that these processes ran on
    launcher_file: str = ""  # accelerate's config, which names the engine
    notes: list[str] = field(default_factory=list)


def read_old_file(path: Path, errors: str = "replace") -> str:
    """The text of a file of an old run. Raises ConfigError for one that is too large."""
    if path.stat().st_size > MAX_FILE_BYTES:
        what, why = f"{path} is too large for an old run", f"over {MAX_FILE_BYTES // 1000} kB"
        fix = "give a file that holds its command or its settings alone"
        refuse(str(path), what, fix, why)
    return path.read_text(encoding="utf-8", errors=errors)
