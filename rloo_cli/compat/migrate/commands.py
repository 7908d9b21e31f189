"""Converts commands that do not train: a server of vLLM, and answers to held-out prompts.

`trl vllm-serve` and `swift rollout` become `rloo vllm-serve`, TRL's generate_tldr.py `rloo eval`.
The answer is a command, not a recipe.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.compat.migrate.recipe import schema_field
from rloo_cli.config.old_names import find_old_name

SERVER, JUDGED = "vllm-serve", "generate_tldr.py"
OURS = {SERVER: ("rloo", "vllm-serve"), JUDGED: ("rloo", "eval", "+recipe=tldr_judge")}
STARTS = {  # followed by the flags
    "vllm-serve": SERVER, "vllm_serve.py": SERVER, "rollout": SERVER, JUDGED: JUDGED
}  # fmt: skip
JUDGED_KEYS = {"n": "eval.max_samples", "judge_model": "eval.judge.model"}


def convert_other_command(words: list[str]) -> str | None:
    """Our command, and comments on what was left out; None for another kind of command."""
    names = [Path(word).name for word in words]
    starts = [
        i for i, n in enumerate(names) if n in STARTS and (n != "rollout" or "swift" in names)
    ]
    if not starts:
        return None
    kind = STARTS[names[starts[-1]]]
    command, notes = [*OURS[kind]], []
    for name, value in _flags_of(words[starts[-1] :]):  # without the launcher's flags
        if key := _key_of(kind, name):
            command.append(f"{key}={value or 'true'}")
        else:
            row = find_old_name(name)
            why = row.note if row is not None and row.note else "rloo has no equivalent"
            notes.append(f"# --{name} {value}".strip() + f": {why}")
    return "\n".join([shlex.join(command), *notes])


def _key_of(kind: str, name: str) -> str | None:
    """Our key for a flag: of the server, or of the model and the data in both kinds."""
    if kind == JUDGED and name in JUDGED_KEYS:
        return JUDGED_KEYS[name]
    short = name.removeprefix("vllm_").removeprefix("model_")
    own = f"generation.server.{short}", f"model.{short}"
    if kind == SERVER and (key := next((k for k in own if schema_field(k)), None)):
        return key
    row = find_old_name(name)
    key = row.new_key if row is not None and not row.fix else None
    return key if key and key.startswith(("model.", "data.path")) else None


def _flags_of(words: list[str]) -> Iterator[tuple[str, str]]:
    """Name and value of each flag; "" for a flag without one."""
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else "--"
            if not equals and not following.startswith("--"):
                value = following
            yield name.replace("-", "_"), value
