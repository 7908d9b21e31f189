"""Checks the paths of a config: models, data, files, the root of the runs.

They are checked before anything is imported, so that a misspelt path costs a second. What is not a
path must be possible as a name on the hub; whether the hub has it is not asked here.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from rloo_cli.config import hf_cache, synthetic, value_model
from rloo_cli.config.judge import OpenaiJudge, RewardJudge
from rloo_cli.config.pasted import guess_name
from rloo_cli.config.schema import RewardConfig, RunConfig
from rloo_cli.utils.errors import Problem

DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")
MODEL_PATH_KEYS = (
    "model.path", "model.ref_path", "model.value.path", "sft.path", "reward_model.path",
)  # fmt: skip
NamedPaths = list[tuple[str, str, dict[str, str]]]  # key, path, synthetic names of this kind


def path_problems(run: RunConfig) -> Iterator[Problem]:
    """What is wrong with the paths of a run."""
    for key, path, synthetic_names in named_paths(run):
        yield from named_path_problems(key, path, synthetic_names)
    template = run.model.chat_template
    if template is not None:
        yield from _template(template)
    yield from _root(run.root)


def named_path_problems(key: str, path: str, synthetic_names: dict[str, str]) -> Iterator[Problem]:
    """What is wrong with one path. `synthetic_names`: SYNTHETIC_MODELS or SYNTHETIC_DATA."""
    if path.startswith(synthetic.MAKE_PREFIX):
        yield from _synthetic_path_problems(key, path, synthetic_names)
    elif path.startswith(synthetic.TASK_PREFIX):
        if synthetic_names is not synthetic.SYNTHETIC_DATA:
            fix = f"data.path={path}, and a model here"
            why = f"{synthetic.TASK_PREFIX}NAME draws questions, and has no weights"
            yield Problem(f"{key} = {path!r} is a task, not a model", key, why, fix)
    else:
        yield from _local_path_problems(key, path, data=synthetic_names is synthetic.SYNTHETIC_DATA)


def named_paths(run: RunConfig) -> NamedPaths:
    """(key, path, synthetic names of its kind) of every model and data set that a run loads."""
    model_keys = ("path", "tokenizer", "ref_path")
    models: dict[str, str | None] = {f"model.{k}": getattr(run.model, k) for k in model_keys}
    if value_model.needs_value_model(run):
        models["model.value.path"] = run.model.value.path
    data = {"data.path": run.data.path}
    data |= {f"data.mixture.{n}.path": s.path for n, s in run.data.mixture_sources.items()}
    data |= {f"eval.sets.{n}.path": d.path for n, d in run.held_out.items() if n}
    rewards: dict[str, str | None] = {}
    for name, entry in run.rewards.items():
        rewards |= _reward_model_paths(f"reward.{name}", entry)
    judge = cast(OpenaiJudge | RewardJudge | None, run.eval.judge)
    if judge is not None and judge.against != "reference":
        rewards["eval.judge.against"] = judge.against
    if judge is not None and judge.type == "reward":
        rewards |= _reward_model_paths("eval.judge.reward", judge.reward)
    kinds = (
        (models, synthetic.SYNTHETIC_MODELS),
        (data, synthetic.SYNTHETIC_DATA),
        (rewards, synthetic.SYNTHETIC_MODELS),
    )
    return [(key, path, names) for paths, names in kinds for key, path in paths.items() if path]


def _reward_model_paths(section: str, entry: RewardConfig) -> dict[str, str | None]:
    names = ("path", "tokenizer") if entry.type == "model" else ()
    return {f"{section}.{name}": getattr(entry, name) for name in names}


def synthetic_model_paths(run: RunConfig) -> list[str]:
    """Every `make:NAME` and GGUF file among a run's models and reward models, each once.

    To make or convert one of them can take a minute: it is done before anything waits for them.
    """
    paths = [path for _, path, names in named_paths(run) if names is synthetic.SYNTHETIC_MODELS]
    made = (path for path in paths if synthetic.is_made_here(path))
    return list(dict.fromkeys(made))


def looks_like_path(value: str) -> bool:
    """Whether this is meant as a path, rather than as a hub name such as org/name."""
    known = value.endswith((*DATA_FILES, synthetic.GGUF_SUFFIX))
    return value.startswith((".", "/", "~")) or value.count("/") > 1 or known


def _synthetic_path_problems(
    key: str, path: str, synthetic_names: dict[str, str]
) -> Iterator[Problem]:
    name = path.removeprefix(synthetic.MAKE_PREFIX)
    if name not in synthetic_names:
        kind = "data set" if synthetic_names is synthetic.SYNTHETIC_DATA else "model"
        why = f"one of: {', '.join(synthetic.MAKE_PREFIX + n for n in sorted(synthetic_names))}"
        fix = f"{key}={synthetic.MAKE_PREFIX}{guess_name(name, synthetic_names)}"
        yield Problem(f"{key} = {path!r}: rloo has no such {kind}", key, why, fix)


def _adapter_folder_problem(key: str, folder: Path) -> Problem:
    """The problem of an adapter's folder where a model's is expected, with its base's name."""
    base = "ITS_BASE"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        about = json.loads((folder / hf_cache.ADAPTER_CONFIG_FILE).read_text())
        base = str(about.get("base_model_name_or_path") or base)
    what = f"{key} = {str(folder)!r} is the folder of an adapter, not of a model"
    why = f"its base is {base}; training continues the adapter on it"
    fix = f"{key}={base} lora=default model.lora.path={folder}"
    return Problem(what, key, why, fix)


def _local_path_problems(key: str, value: str, data: bool) -> Iterator[Problem]:
    path = Path(value).expanduser()
    looked, fix = f"looked at {path.absolute()}", f"{key}=ORG/NAME for the hub, or a path"
    try:
        exists = path.exists()
    except OSError as error:
        yield Problem(f"{key} is not a path", key, f"{error.strerror}: {value[:80]!r}...", fix)
        return
    if not exists and looks_like_path(value):
        yield Problem(f"{key} = {value!r} does not exist", key, looked, f"{fix} that exists")
    elif not exists and not hf_cache.is_hub_name(value):
        why = f"{looked}; a hub name is ORG/NAME, of letters, digits, -, _ and ."
        yield Problem(f"{key} = {value!r} is neither a path nor a hub name", key, why, fix)
    elif exists and not data and path.is_file() and path.suffix == synthetic.GGUF_SUFFIX:
        return
    elif exists and not path.is_dir() and not (data and path.is_file()):
        kind = "a file" if path.is_file() else "neither a file nor a folder"
        yield Problem(f"{key} = {value!r} is {kind}", key, looked, f"{fix} of the right kind")
    elif exists and key in MODEL_PATH_KEYS and not (path / "config.json").exists():
        if (path / hf_cache.ADAPTER_CONFIG_FILE).exists():
            yield _adapter_folder_problem(key, path)
            return
        yield Problem(f"{key} = {value!r} has no config.json: it is not a model", key, looked, fix)


def _template(value: str) -> Iterator[Problem]:
    path, key = synthetic.template_path(value), "model.chat_template"
    if value.startswith(synthetic.MAKE_PREFIX) and not path.is_file():
        names = ", ".join(synthetic.MAKE_PREFIX + n for n in synthetic.SYNTHETIC_TEMPLATES)
        yield Problem(f"{key} = {value!r} is not known", key, f"there is {names}", f"{key}={names}")
        return
    fix = f"{key}=null for the tokenizer's own, or a text file"
    if not path.is_file():
        yield Problem(f"{key} = {value!r} is not a file", key, f"looked at {path.absolute()}", fix)
        return
    try:
        path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        yield Problem(f"{key} = {value!r} cannot be read", key, str(error), fix)


def _root(root: str) -> Iterator[Problem]:
    path = Path(root).absolute()
    try:
        above = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:
        why = f"{error.strerror}: {root[:80]!r}..."
        yield Problem("root is not a path", "root", why, "root=runs")
        return
    if not above.is_dir():
        why = f"{above} is a file"
        yield Problem(f"root = {root!r} is not a folder", "root", why, "root=runs")
