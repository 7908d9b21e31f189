"""Finds and reads a run's sample files: completions with scores and advantages.

`samples/step_000010.jsonl` has the training samples of step 10, `eval_000010.jsonl` the held-out
set after it, `eval_NAME_000010.jsonl` the held-out set of that name.
"""

import json
import re
from pathlib import Path

from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject

SampleRecord = JsonObject
SAMPLES_FILE = re.compile(r"(?P<kind>step|eval)(?:_(?P<set>.+))?_(?P<step>\d+)\.jsonl")


# Types of a sample's fields, if present and not null; readers of samples rely on them.
FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "draw": (int,), "k": (int,), "prompt": (str, list), "completion": (str,), "rewards": (dict,),
    "score": (int, float), "completion_length": (int,), "weight_version": (int,),
    "token_strip": (dict,), "row": (dict,), "turns": (list,), "episode": (dict,),
    "version_spans": (list,), "images": (list,),
}  # fmt: skip


def list_sample_files(folder: Path, held_out: bool = False) -> dict[str, dict[int, Path]]:
    """Held-out set ("" if it has no name, and for a step's own samples) -> step -> file."""
    kind = "eval" if held_out else "step"
    files: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("samples/*.jsonl")):
        match = SAMPLES_FILE.fullmatch(path.name)
        if match and match["kind"] == kind:
            files.setdefault(match["set"] or "", {})[int(match["step"])] = path
    return files


def find_samples_file(
    folder: Path, step: int | None = None, held_out: bool = False, set_name: str | None = None
) -> Path:
    """The sample file of a step; without a step, the last one.

    Raises ConfigError, which names the nearest existing step or set.
    """
    held_out = held_out or set_name is not None
    what = "held-out samples" if held_out else "samples"
    files = list_sample_files(folder, held_out)
    if not files:
        why = f"found none in {folder / 'samples'}"
        fix = f"rloo samples {folder} --eval, or logging.samples_every=1 in the next run"
        if held_out:
            fix = f"rloo samples {folder} for training; data.eval_split=NAME in the next run"
        refuse("command line", f"{folder} has no {what}", fix, why)
    wanted = set_name or ("" if "" in files else next(iter(files)))
    if wanted not in files or (set_name is None and wanted and len(files) > 1):
        names = [name for name in files if name]
        kind, fix = ("held-out set", "--set NAME") if names else ("named held-out set", "--eval")
        refuse_unknown_name(kind, set_name, names, fix)
    steps = files[wanted]
    if step is None:
        return steps[max(steps)]
    if step not in steps:
        near = sorted(sorted(steps, key=lambda other: abs(other - step))[:2])
        why = f"the nearest steps with samples: {' and '.join(map(str, near))}"
        refuse("command line", f"step {step} has no {what}", f"--step {near[0]}", why)
    return steps[step]


def read_sample_records(path: Path) -> list[SampleRecord]:
    """Every sample of a file; non-finite numbers are None.

    Raises DataError, which names the first line that is not a sample.
    """
    samples = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            samples.append(_checked_sample(json.loads(line, parse_constant=lambda _: None)))
        except (ValueError, RecursionError) as error:
            fix = f"remove the file (rm {path}); other files are not affected"
            refuse(f"{path}:{number}", "a line is not a sample", fix, str(error), error=DataError)
    return samples


def _checked_sample(values: object) -> SampleRecord:
    """A line's value. Raises ValueError with the reason if it is not a sample."""
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, found a {type(values).__name__}")
    for name, types in FIELD_TYPES.items():
        value = values.get(name)
        if value is not None and not isinstance(value, types):
            raise ValueError(f"its {name} is a {type(value).__name__}")
    return values
