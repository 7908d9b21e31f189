"""Settings of the two trainings before RLOO, from a run's config: model, data, output folder.

Imports no torch. A key of `sft` or `reward_model` that is null is filled in from `model` and `data`
here, and nowhere else.
"""

from collections.abc import Iterator
from pathlib import Path

from rloo_cli.config import hf_cache, rules_lora, rules_paths, synthetic
from rloo_cli.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

TRAINING_SECTIONS = ("sft", "reward_model")


def training_settings(run: RunConfig, section: str) -> TrainingConfig:
    """The section `sft` or `reward_model`."""
    settings: TrainingConfig = getattr(run, section)
    return settings


def training_model(run: RunConfig, section: str) -> ModelConfig:
    """The model that a training starts from; there is no reference."""
    settings = training_settings(run, section)
    other: dict[str, object] = {"ref_path": None}
    if settings.path is not None:
        other |= {"path": settings.path, "revision": settings.revision}
    return run.model.model_copy(update=other)


def training_data(run: RunConfig, section: str) -> DataConfig:
    """The data of a training. Another data set than the run's has names and columns of its own."""
    settings = training_settings(run, section).data
    values: JsonObject = settings.model_dump(exclude_none=True)
    if settings.path is not None:
        plain = dict.fromkeys(("name", "revision", "max_samples", "mixture", "filter", "map"))
        values = plain | {"columns": {}, "types": {}, "streaming": False} | values
    # Longer examples are left out, whatever data.overlong does to prompts: a cut prompt would be
    # trained on as if it were whole.
    limits = {"eval_split": settings.eval_split, "overlong": "filter"}
    return run.data.model_copy(update=values | limits)


def training_folder(run: RunConfig, section: str) -> Path:
    """The folder that the trained model is written to; it is not a run folder, root/name."""
    return Path(run.root, section, str(run.name))


def training_problems(run: RunConfig, section: str) -> Iterator[Problem]:
    """What is wrong with the settings of a training, found before anything is loaded."""
    settings = training_settings(run, section)
    if settings.path is not None:
        key, names = f"{section}.path", synthetic.SYNTHETIC_MODELS
        yield from rules_paths.named_path_problems(key, settings.path, names)
    key = f"{section}.data.path"
    if settings.data.path is None and run.data.path is None:
        what, why = f"{section} reads one data set", "data.mixture is not a data set of its own"
        yield Problem(what, key, why, f"{key}=...")
    if settings.data.path is not None:
        names = synthetic.SYNTHETIC_DATA
        yield from rules_paths.named_path_problems(key, settings.data.path, names)
    if settings.revision is not None and settings.path is None:
        what, why = (
            f"{section}.revision is set without {section}.path",
            "the model is model.path, which has a revision of its own",
        )
        fix = "model.revision=..., or say which model it is of"
        yield Problem(what, f"{section}.revision", why, fix)
    yield from rules_lora.supervised_adapter_problems(run, section)
    size, batch_size = settings.micro_batch_size, settings.batch_size
    if size is not None and size > batch_size:
        key = f"{section}.micro_batch_size"
        why = f"a step has {batch_size} examples ({section}.batch_size)"
        yield Problem(f"{key} = {size} is more than a step has", key, why, f"{key}={batch_size}")


def split_batch(settings: TrainingConfig, ranks: int) -> tuple[int, int]:
    """How a step's examples are split. -> (examples of a forward pass, passes of each rank)

    A pass has the most examples, up to micro_batch_size, of which a rank's share is a multiple.
    """
    share = settings.batch_size // ranks
    most = min(settings.micro_batch_size or share, share)
    size = next(n for n in range(most, 0, -1) if share % n == 0)
    return size, share // size


def spread_problems(run: RunConfig, section: str, ranks: int) -> Iterator[Problem]:
    """Why so many processes cannot share a training."""
    size, key = training_settings(run, section).batch_size, f"{section}.batch_size"
    if size % ranks:
        what, why = f"{key} = {size} cannot be shared", f"{ranks} processes take equal parts of it"
        yield Problem(what, key, why, f"{key}={-(-size // ranks) * ranks}")
    engine = run.distributed.engine
    if ranks > 1 and run.model.lora is not None and engine not in rules_lora.WHOLE_ENGINES:
        what = f"distributed.engine = {engine} and model.lora do not go together in {section}"
        why = "the adapter is merged into weights that a process has whole"
        fix = "distributed.engine=ddp, or model.lora=null"
        yield Problem(what, "distributed.engine", why, fix)


def training_download_problems(run: RunConfig, section: str) -> Iterator[Problem]:
    """What a training would have to download where the network is off."""
    if not hf_cache.is_hub_offline():
        return
    model, data = training_model(run, section), training_data(run, section)
    settings, cache = training_settings(run, section), hf_cache.hub_cache_folder()
    model_key = f"{section}.path" if settings.path else "model.path"
    data_key = f"{section}.data.path" if settings.data.path else "data.path"
    needed = [
        (model_key, model.path, model.revision, "model"),
        ("model.tokenizer", model.tokenizer or "", None, "model"),
        (data_key, data.path or "", data.revision, "dataset"),
    ]
    for key, path, revision, kind in needed:
        if not path or not synthetic.is_hub_name(path):
            continue
        if not hf_cache.is_in_hub_cache(path, revision, kind):
            why = f"HF_HUB_OFFLINE is set, and it is not in the cache: {cache}"
            override = f"{'data' if kind == 'dataset' else 'model'}.path={path}"
            fix = f"on a machine with network: {hf_cache.fetch_command()} {override}"
            yield Problem(f"{key} = {path!r} was not found", key, why, fix)
