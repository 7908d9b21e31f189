"""Holds what was read of an old run, before any of it is converted."""

from dataclasses import dataclass, field

from rloo_cli.utils.files import JsonObject


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
