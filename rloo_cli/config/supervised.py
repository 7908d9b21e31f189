"""The two trainings before RLOO, as a run's config describes them: model, data, where it is kept.

Imports no torch. What a key of `sft` or `reward_model` leaves null is filled in from `model` and
`data` here, and nowhere else.
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
    found: TrainingConfig = getattr(run, section)
    return found


def training_model(run: RunConfig, section: str) -> ModelConfig:
    """The model that a training starts from; there is no reference."""
    own = training_settings(run, section)
    if own.path is None:
        return run.model.model_copy(update={"ref_path": None})
    other = {"path": own.path, "revision": own.revision, "ref_path": None}
    return run.model.model_copy(update=other)


def training_data(run: RunConfig, section: str) -> DataConfig:
    """The rows of a training. Another data set than the run's has its own names and columns."""
    own = training_settings(run, section).data
    given = own.model_dump(exclude_none=True)
    if own.path is not None:
        plain: JsonObject = {
            "name": own.name,
            "revision": own.revision,
            "columns": {},
            "max_samples": None,
            "mixture": None,
            "filter": None,
            "map": None,
            "streaming": False,
        }
        given = plain | given
    # Longer rows are left out, whatever data.overlong does to prompts: a cut prompt would be
    # trained on as if it were whole.
    limits = {"eval_split": own.eval_split, "overlong": "filter"}
    return run.data.model_copy(update=given | limits)


def training_folder(run: RunConfig, section: str) -> Path:
    """Where the model is kept: no run's folder, which is root/name."""
    return Path(run.root, section, str(run.name))


def training_problems(run: RunConfig, section: str) -> Iterator[Problem]:
    """What is wrong with the paths of a training, before anything is loaded."""
    own = training_settings(run, section)
    if own.path is not None:
        yield from rules_paths.named_path_problems(
            f"{section}.path", own.path, synthetic.SYNTHETIC_MODELS
        )
    if own.data.path is None and run.data.path is None:
        what, fix = f"{section} reads one data set", f"{section}.data.path=..."
        yield Problem(what, f"{section}.data.path", "data.mixture is no data set of its own", fix)
    if own.data.path is not None:
        yield from rules_paths.named_path_problems(
            f"{section}.data.path", own.data.path, synthetic.SYNTHETIC_DATA
        )
    if own.revision is not None and own.path is None:
        fix = "model.revision=..., or say which model it is of"
        yield Problem(f"{section}.revision is set without {section}.path", f"{section}.revision",
                      "the model is model.path, which has a revision of its own", fix)  # fmt: skip
    yield from rules_lora.unsupported_adapter_problems(run, section)
    if own.micro_batch_size is not None and own.micro_batch_size > own.batch_size:
        key = f"{section}.micro_batch_size"
        why = f"a step has {own.batch_size} rows ({section}.batch_size)"
        yield Problem(f"{key} = {own.micro_batch_size} is more than a step has", key, why,
                      f"{key}={own.batch_size}")  # fmt: skip


def training_download_problems(run: RunConfig, section: str) -> Iterator[Problem]:
    """What a training would have to download where the network is off."""
    if not hf_cache.is_hub_offline():
        return
    model, data = training_model(run, section), training_data(run, section)
    own = training_settings(run, section)
    needed = [
        (f"{section}.path" if own.path else "model.path", model.path, model.revision, "model"),
        ("model.tokenizer", model.tokenizer or "", None, "model"),
        (f"{section}.data.path" if own.data.path else "data.path", data.path or "", data.revision,
         "dataset"),
    ]  # fmt: skip
    for key, path, revision, kind in needed:
        here = (
            not path or path.startswith(synthetic.MAKE_PREFIX) or Path(path).expanduser().exists()
        )
        if not here and not hf_cache.is_in_hub_cache(path, revision, kind):
            why = (
                f"HF_HUB_OFFLINE is set, and it is not in the cache: {hf_cache.hub_cache_folder()}"
            )
            word = "data.path" if kind == "dataset" else "model.path"
            fix = f"on a machine with network: {hf_cache.fetch_command()} {word}={path}"
            yield Problem(f"{key} = {path!r} is not to be had", key, why, fix)
