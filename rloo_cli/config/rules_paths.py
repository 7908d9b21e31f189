"""What a config names that has to lie somewhere: models, data, files, the root of the runs.

Looked at before anything is imported, so that a path with a slip costs a second. What is not a
path has to be able to be a hub's name; whether the hub has it is not asked here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_cli.config import hf_cache, synthetic, value_model
from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils.errors import Problem

DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")
MODEL_PATH_KEYS = (
    "model.path",
    "model.ref_path",
    "model.value.path",
    "sft.path",
    "reward_model.path",
)
NamedPaths = list[tuple[str, str, dict[str, str]]]  # key, path, what rloo makes of this kind


def path_problems(run: RunConfig) -> Iterator[Problem]:
    """Every path of a run that cannot be one."""
    for key, path, makes in named_paths(run):
        yield from named_path_problems(key, path, makes)
    template = run.model.chat_template
    if template is not None:
        yield from _template(template)
    yield from _root(run.root)


def named_path_problems(key: str, path: str, synthetic_names: dict[str, str]) -> Iterator[Problem]:
    """What is wrong with one path; `makes`: what rloo makes of its kind."""
    if path.startswith(synthetic.MAKE_PREFIX):
        yield from _synthetic_path_problems(key, path, synthetic_names)
    else:
        yield from _local_path_problems(key, path, data=synthetic_names is synthetic.SYNTHETIC_DATA)


def named_paths(run: RunConfig) -> NamedPaths:
    """(key, path, what is made of its kind) of every model and data set that a run loads."""
    found: NamedPaths = []
    for key in ("path", "tokenizer", "ref_path"):
        found.append((f"model.{key}", getattr(run.model, key) or "", synthetic.SYNTHETIC_MODELS))
    if value_model.needs_value_model(run):
        found.append(("model.value.path", run.model.value.path or "", synthetic.SYNTHETIC_MODELS))
    found.append(("data.path", run.data.path or "", synthetic.SYNTHETIC_DATA))
    sources = run.data.mixture_sources.items()
    found += [
        (f"data.mixture.{n}.path", s.path or "", synthetic.SYNTHETIC_DATA) for n, s in sources
    ]
    sets = [(f"eval.sets.{n}.path", d.path or "") for n, d in run.held_out.items() if n]
    found += [(key, path, synthetic.SYNTHETIC_DATA) for key, path in sets]
    for name, entry in run.rewards.items():
        for key in ("path", "tokenizer") if entry.type == "model" else ():
            found.append(
                (f"reward.{name}.{key}", getattr(entry, key) or "", synthetic.SYNTHETIC_MODELS)
            )
    judge: Any = run.eval.judge
    if judge is not None and judge.against != "reference":
        found.append(("eval.judge.against", judge.against, synthetic.SYNTHETIC_MODELS))
    if judge is not None and judge.type == "reward" and judge.reward.type == "model":
        for key in ("path", "tokenizer"):
            value = getattr(judge.reward, key) or ""
            found.append((f"eval.judge.reward.{key}", value, synthetic.SYNTHETIC_MODELS))
    return [entry for entry in found if entry[1]]


def synthetic_model_paths(run: RunConfig) -> list[str]:
    """Every `make:NAME` among a run's models and reward models, each once. One that is trained
    takes a minute: it is made before anything waits for it."""
    paths = [path for _, path, makes in named_paths(run) if makes is synthetic.SYNTHETIC_MODELS]
    return list(dict.fromkeys(path for path in paths if path.startswith(synthetic.MAKE_PREFIX)))


def looks_like_path(value: str) -> bool:
    """A path, rather than a hub name such as org/name."""
    return value.startswith((".", "/", "~")) or value.count("/") > 1 or value.endswith(DATA_FILES)


def _synthetic_path_problems(
    key: str, path: str, synthetic_names: dict[str, str]
) -> Iterator[Problem]:
    name = path.removeprefix(synthetic.MAKE_PREFIX)
    if name not in synthetic_names:
        close = nearest_names(name, synthetic_names) or sorted(synthetic_names)
        yield Problem(
            f"{key} = {path!r}: rloo makes no such thing",
            key,
            f"one of: {', '.join(synthetic.MAKE_PREFIX + n for n in sorted(synthetic_names))}",
            f"{key}={synthetic.MAKE_PREFIX}{close[0]}",
        )


def _local_path_problems(key: str, value: str, data: bool) -> Iterator[Problem]:
    path = Path(value).expanduser()
    looked, fix = f"looked at {path.absolute()}", f"{key}=ORG/NAME for the hub, or a path"
    try:
        there = path.exists()
    except OSError as error:
        yield Problem(f"{key} is no path", key, f"{error.strerror}: {value[:80]!r}...", fix)
        return
    if not there and looks_like_path(value):
        yield Problem(f"{key} = {value!r} does not exist", key, looked, f"{fix} that is there")
    elif not there and not hf_cache.is_hub_name(value):
        why = f"{looked}; a hub name is ORG/NAME, of letters, digits, -, _ and ."
        yield Problem(f"{key} = {value!r} is neither a path nor a hub name", key, why, fix)
    elif there and not path.is_dir() and not (data and path.is_file()):
        kind = "a file" if path.is_file() else "neither a file nor a folder"
        yield Problem(f"{key} = {value!r} is {kind}", key, looked, f"{fix} of the right kind")
    elif there and key in MODEL_PATH_KEYS and not (path / "config.json").exists():
        yield Problem(f"{key} = {value!r} has no config.json: it is no model", key, looked, fix)


def _template(value: str) -> Iterator[Problem]:
    path, key = Path(value).expanduser(), "model.chat_template"
    if not path.is_file():
        yield Problem(f"{key} = {value!r} is not a file", key, f"looked at {path.absolute()}")
        return
    try:
        path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(f"{key} = {value!r} cannot be read", key, str(error))


def _root(root: str) -> Iterator[Problem]:
    path = Path(root).absolute()
    try:
        above = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        yield Problem("root is no path", "root", f"{error.strerror}: {root[:80]!r}...", "root=runs")
        return
    if not above.is_dir():
        yield Problem(f"root = {root!r} is no folder", "root", f"{above} is a file", "root=runs")
