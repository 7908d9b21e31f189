"""Settings of the two trainings before RLOO, from a run's config: model, data, output folder.

Imports no torch. Null keys of `sft` or `reward_model` are filled in from `model` and `data` here,
and nowhere else.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.config import hf_cache, rules_lora, rules_paths, synthetic
from rloo_cli.config.rules_paths import NamedPath
from rloo_cli.config.schema import (
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    TrainingData,
)
from rloo_cli.utils.errors import Problem, value_problem
from rloo_cli.utils.files import JsonObject

TRAINING_SECTIONS = ("sft", "reward_model")


@dataclass(frozen=True)
class SupervisedTraining:
    """One training before RLOO, with defaults from `model` and `data`."""

    section: str  # sft or reward_model
    settings: TrainingConfig
    model: ModelConfig  # the start, without a reference
    data: DataConfig
    folder: Path  # of the trained model; it is not a run folder, root/name


def supervised_training(run: RunConfig, section: str) -> SupervisedTraining:
    """The training of the section `sft` or `reward_model`."""
    settings: TrainingConfig = getattr(run, section)
    other: dict[str, object] = {"ref_path": None}
    if settings.path is not None:
        other |= {"path": settings.path, "revision": settings.revision}
    model, data = run.model.model_copy(update=other), _training_data(run.data, settings.data)
    return SupervisedTraining(
        section, settings, model, data, Path(run.root, section, str(run.name))
    )


def _training_data(data: DataConfig, settings: TrainingData) -> DataConfig:
    """The data of a training. A data set other than the run's has its own names and columns."""
    values: JsonObject = settings.model_dump(exclude_none=True)
    if settings.path is not None:
        plain = dict.fromkeys(("name", "revision", "max_samples", "mixture", "filter", "map"))
        values = plain | {"columns": {}, "types": {}, "streaming": False} | values
    # Longer examples are dropped, whatever data.overlong does to prompts: a truncated prompt would
    # be trained on as if it were complete.
    limits = {"eval_split": settings.eval_split, "overlong": "filter"}
    return data.model_copy(update=values | limits)


def training_problems(training: SupervisedTraining) -> Iterator[Problem]:
    """Problems of a training's settings, found before anything is loaded."""
    section, settings = training.section, training.settings
    if settings.path is not None:
        named = NamedPath(f"{section}.path", settings.path, settings.revision, "model")
        yield from rules_paths.named_path_problems(named)
    key = f"{section}.data.path"
    if training.data.path is None:
        why = f"{section} reads a single data set, but data.mixture has several"
        yield value_problem(key, "null", "is required", "PATH", why)
    if settings.data.path is not None:
        named = NamedPath(key, settings.data.path, settings.data.revision, "dataset")
        yield from rules_paths.named_path_problems(named)
    if settings.revision is not None and settings.path is None:
        what = f"{section}.revision is set without {section}.path"
        why = "the model is model.path, which has its own revision"
        fix = f"model.revision={settings.revision}, or {section}.path=MODEL"
        yield Problem(what, f"{section}.revision", why, fix)
    yield from rules_lora.supervised_adapter_problems(training.model, section)
    size, batch_size = settings.micro_batch_size, settings.batch_size
    if size is not None and size > batch_size:
        key = f"{section}.micro_batch_size"
        why = f"a step has {batch_size} examples ({section}.batch_size)"
        yield value_problem(key, size, "is more than a step has", batch_size, why)


def split_batch(settings: TrainingConfig, ranks: int) -> tuple[int, int]:
    """How a step's examples are split. -> (examples of a forward pass, passes of each rank)

    A pass has as many examples as possible, up to micro_batch_size, in equal parts.
    """
    share = settings.batch_size // ranks
    most = min(settings.micro_batch_size or share, share)
    size = next(n for n in range(most, 0, -1) if share % n == 0)
    return size, share // size


def spread_problems(training: SupervisedTraining, engine: str, ranks: int) -> Iterator[Problem]:
    """Why this many processes cannot share a training."""
    section, size = training.section, training.settings.batch_size
    key = f"{section}.batch_size"
    if size % ranks:
        why, more = f"{ranks} processes need equal parts", -(-size // ranks) * ranks
        yield value_problem(key, size, "cannot be split evenly", more, why)
    if ranks > 1 and training.model.lora is not None and engine not in rules_lora.WHOLE_ENGINES:
        what = f"does not go with model.lora in {section}"
        why = "the adapter is merged into unsharded weights"
        fix = "ddp, or model.lora=null"
        yield value_problem("distributed.engine", engine, what, fix, why)


def training_download_problems(training: SupervisedTraining) -> Iterator[Problem]:
    """What a training would have to download while offline."""
    if not hf_cache.is_hub_offline():
        return
    section, settings = training.section, training.settings
    model, data, cache = training.model, training.data, hf_cache.hub_cache_folder()
    model_key = f"{section}.path" if settings.path else "model.path"
    data_key = f"{section}.data.path" if settings.data.path else "data.path"
    needed = [
        NamedPath(model_key, model.path, model.revision, "model"),
        NamedPath("model.tokenizer", model.tokenizer or "", None, "model"),
        NamedPath(data_key, data.path or "", data.revision, "dataset"),
    ]
    for named in needed:
        key, path = named.key, named.path
        if path and synthetic.is_hub_name(path) and not named.is_cached:
            why = f"HF_HUB_OFFLINE is set, and it is not in the cache: {cache}"
            override = f"{'data' if named.kind == 'dataset' else 'model'}.path={path}"
            fix = f"on a machine with network: {hf_cache.fetch_command()} {override}"
            yield Problem(f"{key} = {path!r} was not found", key, why, fix)
