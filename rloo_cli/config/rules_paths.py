"""Checks the paths of a config: models, data, files, the root of the runs.

They are checked before anything is imported, so that a misspelt path costs a second. What is not a
path must be a valid hub name; whether it exists on the hub is not checked here.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from rloo_cli.config import hf_cache, synthetic, value_model
from rloo_cli.config.judge import OpenaiJudge, RewardJudge
from rloo_cli.config.pasted import guess_name, unknown_name_problem
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils.errors import Problem, value_problem

DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")
MODEL_PATH_KEYS = (
    "model.path", "model.ref_path", "model.value.path", "sft.path", "reward_model.path",
)  # fmt: skip


class NamedPath(NamedTuple):
    """A model, tokenizer or data set that a key of the config names."""

    key: str
    path: str
    revision: str | None  # branch, tag or commit; None = main
    kind: Literal["model", "dataset"]

    @property
    def is_cached(self) -> bool:
        """Whether it is in the hub cache; only for hub names."""
        return hf_cache.is_in_hub_cache(self.path, self.revision, self.kind)


def path_problems(named: Iterable[NamedPath], template: str | None, root: str) -> Iterator[Problem]:
    """Problems of a run's paths. `template`: model.chat_template."""
    for each in named:
        yield from named_path_problems(each)
    if template is not None:
        yield from _template(template)
    yield from _root(root)


def named_path_problems(named: NamedPath) -> Iterator[Problem]:
    """Problems of one path."""
    key, path = named.key, named.path
    if path.startswith(synthetic.MAKE_PREFIX):
        yield from _synthetic_path_problems(named)
    elif path.startswith(synthetic.TASK_PREFIX):
        if named.kind == "model":
            fix = f"data.path={path}, and a model here"
            why = f"{synthetic.TASK_PREFIX}NAME generates questions and has no weights"
            yield Problem(f"{key} = {path!r} is a task, not a model", key, why, fix)
    else:
        yield from _local_path_problems(key, path, data=named.kind == "dataset")


def named_paths(run: RunConfig) -> list[NamedPath]:
    """Every model and data set that a run loads."""
    model = run.model
    named = _named_model("model.path", model.path, model.revision)
    named += _named_model("model.tokenizer", model.tokenizer)
    named += _named_model("model.ref_path", model.ref_path)
    if value_model.needs_value_model(run.algorithm):
        named += _named_model("model.value.path", model.value.path, model.value.revision)
    data = {"data": run.data}
    data |= {f"data.mixture.{name}": source for name, source in run.data.mixture_sources.items()}
    data |= {f"eval.sets.{name}": held for name, held in run.held_out.items() if name}
    named += [
        NamedPath(f"{section}.path", source.path, source.revision, "dataset")
        for section, source in data.items()
        if source.path
    ]
    for name, entry in run.rewards.items():
        named += _reward_models(f"reward.{name}", entry)
    judge = cast(OpenaiJudge | RewardJudge | None, run.eval.judge)
    if judge is not None and judge.against != "reference":
        named += _named_model("eval.judge.against", judge.against)
    if judge is not None and judge.type == "reward":
        named += _reward_models("eval.judge.reward", judge.reward)
    return named


def _named_model(key: str, path: str | None, revision: str | None = None) -> list[NamedPath]:
    return [NamedPath(key, path, revision, "model")] if path else []


def _reward_models(section: str, entry: Any) -> list[NamedPath]:
    """The model and the tokenizer of a reward of type `model`; [] for any other."""
    if entry.type != "model":
        return []
    model = _named_model(f"{section}.path", entry.path, entry.revision)
    return model + _named_model(f"{section}.tokenizer", entry.tokenizer)


def synthetic_model_paths(named: Iterable[NamedPath]) -> list[str]:
    """Every `make:NAME` and GGUF file among a run's models and reward models, without duplicates.

    Building or converting one can take a minute: do it before anything waits for it.
    """
    paths = (each.path for each in named if each.kind == "model")
    return list(dict.fromkeys(path for path in paths if synthetic.is_made_here(path)))


def looks_like_path(value: str) -> bool:
    """Whether this is meant as a path, rather than as a hub name such as org/name."""
    known = value.endswith((*DATA_FILES, synthetic.GGUF_SUFFIX))
    return value.startswith((".", "/", "~")) or value.count("/") > 1 or known


def _synthetic_path_problems(named: NamedPath) -> Iterator[Problem]:
    key, name = named.key, named.path.removeprefix(synthetic.MAKE_PREFIX)
    models, data = synthetic.SYNTHETIC_MODELS, synthetic.SYNTHETIC_DATA
    synthetic_names = models if named.kind == "model" else data
    if name not in synthetic_names:
        kind = "model" if named.kind == "model" else "data set"
        paths = [f"{synthetic.MAKE_PREFIX}{each}" for each in synthetic_names]
        fix = f"{key}={synthetic.MAKE_PREFIX}{guess_name(name, synthetic_names)}"
        yield unknown_name_problem(key, named.path, kind, paths, fix)


def _adapter_folder_problem(key: str, folder: Path) -> Problem:
    """The problem of an adapter's folder where a model's is expected, with its base's name."""
    base = "ITS_BASE"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        about = json.loads((folder / hf_cache.ADAPTER_CONFIG_FILE).read_text())
        base = str(about.get("base_model_name_or_path") or base)
    what = f"{key} = {str(folder)!r} is an adapter, not a model"
    why = f"its base is {base}; training continues the adapter on it"
    fix = f"{key}={base} lora=default model.lora.path={folder}"
    return Problem(what, key, why, fix)


def _local_path_problems(key: str, value: str, data: bool) -> Iterator[Problem]:
    path, problem = Path(value).expanduser(), ""
    looked, fix = f"looked at {path.absolute()}", "ORG/NAME for the hub, or a path"
    try:
        exists = path.exists()
    except OSError as error:
        why = f"{error.strerror}: {value[:80]!r}..."
        yield Problem(f"{key} is not a path", key, why, f"{key}={fix}")
        return
    if not exists and looks_like_path(value):
        problem, fix = "does not exist", f"{fix} that exists"
    elif not exists and not hf_cache.is_hub_name(value):
        problem = "is neither a path nor a hub name"
        looked += "; a hub name is ORG/NAME, of letters, digits, -, _ and ."
    elif exists and not data and path.is_file() and path.suffix == synthetic.GGUF_SUFFIX:
        return
    elif exists and not path.is_dir() and not (data and path.is_file()):
        problem = f"is {'a file' if path.is_file() else 'neither a file nor a folder'}"
        fix += " of the right kind"
    elif exists and key in MODEL_PATH_KEYS and not (path / "config.json").exists():
        if (path / hf_cache.ADAPTER_CONFIG_FILE).exists():
            yield _adapter_folder_problem(key, path)
            return
        problem = "is not a model: it has no config.json"
    if problem:
        yield value_problem(key, repr(value), problem, fix, looked)


def _template(value: str) -> Iterator[Problem]:
    path, key = synthetic.template_path(value), "model.chat_template"
    if value.startswith(synthetic.MAKE_PREFIX) and not path.is_file():
        names = [f"{synthetic.MAKE_PREFIX}{name}" for name in synthetic.SYNTHETIC_TEMPLATES]
        fix = f"{key}={' or '.join(names)}"
        yield unknown_name_problem(key, value, "template", names, fix)
        return
    fix = "null for the tokenizer's own, or a text file"
    if not path.is_file():
        looked = f"looked at {path.absolute()}"
        yield value_problem(key, repr(value), "is not a file", fix, looked)
        return
    try:
        path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        yield value_problem(key, repr(value), "cannot be read", fix, str(error))


def _root(root: str) -> Iterator[Problem]:
    path = Path(root).absolute()
    try:
        above = next(p for p in (path, *path.parents) if p.exists())
        why = "" if above.is_dir() else f"{above} is a file"
    except OSError as error:
        why = str(error.strerror)
    if why:
        yield value_problem("root", f"{root!r:.80}", "is not a folder", "runs", why)
