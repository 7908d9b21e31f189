"""Loads a reward model and its tokenizer, and refuses anything else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rloo_cli.config import synthetic
from rloo_cli.policy import load, reward_adapter
from rloo_cli.policy.reward_scores import RewardModelScorer
from rloo_cli.utils.errors import MachineError, RunError, refuse
from rloo_cli.utils.files import JsonObject

T = TypeVar("T")


class RewardModelKeys(Protocol):
    """The keys of a reward of type `model` that are read here (`rewards.model`)."""

    path: str
    tokenizer: str | None
    revision: str | None
    model_kwargs: JsonObject
    dtype: str
    trust_remote_code: bool
    batch_size: int
    device: str
    offload: bool


def load_reward_tokenizer(key: str, config: RewardModelKeys) -> PreTrainedTokenizerBase:
    """Load the reward model's own tokenizer, with a pad token. `key`: reward.NAME.

    Raises MachineError if it was not found, or has neither a pad nor an EOS token.
    """
    path = config.tokenizer or config.path
    where = f"{key}.tokenizer" if config.tokenizer else f"{key}.path"
    # The revision belongs to `path`, not to the tokenizer's repository.
    revision = None if config.tokenizer else config.revision
    call = AutoTokenizer.from_pretrained
    found = _load_pretrained_reward(call, path, where, key, config, revision=revision)
    if found.pad_token_id is None:
        if found.eos_token_id is None:
            what = f"the tokenizer of {path} has neither a pad token nor an EOS token"
            fix = f"{key}.tokenizer=FOLDER of one with either"
            refuse(where, what, fix, "sequences are padded", error=MachineError)
        found.pad_token = found.eos_token
    return found


def load_reward_model(
    key: str, config: RewardModelKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> RewardModelScorer:
    """Load the reward model, in eval mode and without gradients. `device`: the value of auto.

    Raises MachineError if it was not found or is not a reward model.
    """
    device = _reward_device(key, config.device, device)
    options: JsonObject = {
        "dtype": _reward_dtype(key, config.dtype, device),
        "revision": config.revision,
        "use_safetensors": True,
        "output_loading_info": True,
        **config.model_kwargs,
    }
    where = f"{key}.path"
    if (adapter := reward_adapter.find_adapter_folder(config.path)) is not None:

        def merge(path: str, **given: object) -> PreTrainedModel:
            return reward_adapter.load_merged_classifier(adapter, key, given)

        model = _load_pretrained_reward(merge, config.path, where, key, config, **options)
    else:
        call = AutoModelForSequenceClassification.from_pretrained
        model, info = _load_pretrained_reward(call, config.path, where, key, config, **options)
        _check_reward_weights(key, config.path, model, info)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    model.config.get_text_config().pad_token_id = pad
    model.config.pad_token_id = pad
    model.eval().requires_grad_(False)
    return RewardModelScorer(model, device, pad, eos, config.batch_size, config.offload)


def _check_reward_weights(
    key: str, path: str, model: PreTrainedModel, loading_info: JsonObject
) -> None:
    """Raise MachineError for missing weights, or for several labels."""
    mismatched = (m[0] for m in loading_info["mismatched_keys"])
    absent = sorted([*loading_info["missing_keys"], *mismatched])
    if absent:
        what = f"{path} lacks {len(absent)} tensors of a {type(model).__name__}"
        why = f"missing: {', '.join(absent[:5])}; they would be random numbers"
    elif model.config.num_labels != 1:
        what = f"{path} is not a reward model"
        why = f"it has {model.config.num_labels} labels; a reward model has one"
    else:
        return
    fix = f"{key}.path=ORG/NAME of a sequence classifier with one label"
    refuse(f"{key}.path", what, fix, why, error=MachineError)


def _reward_device(key: str, name: str, default: torch.device) -> torch.device:
    if name == "auto":
        return default
    found = torch.device(name)
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if found.type == "cuda" and (found.index or 0) >= count:
        what, why = f"{key}.device = {name} does not exist", f"this machine has {count} GPUs"
        refuse(f"{key}.device", what, f"{key}.device=auto", why, error=MachineError)
    return found


def _reward_dtype(key: str, name: str, device: torch.device) -> torch.dtype:
    try:
        return load.resolve_dtype(name, device)
    except MachineError as error:
        what, where, fix = f"{key}.dtype = {name}", f"{key}.dtype", f"{key}.dtype=float32"
        renamed = [replace(p, what=what, where=where, fix=fix) for p in error.problems]
        raise MachineError(*renamed) from None


def _load_pretrained_reward(
    call: Callable[..., T],
    name: str,
    where: str,
    key: str,
    config: RewardModelKeys,
    **options: object,
) -> T:
    """Call a `from_pretrained`, and turn its many errors into one with a fix."""
    options = {"trust_remote_code": config.trust_remote_code, **options}
    path = synthetic.resolve_model_path(name)
    try:
        return call(path, **{k: v for k, v in options.items() if v is not None})
    except RunError:  # from a signal
        raise
    except Exception as error:  # libraries may raise anything for a damaged file
        fix = f"{key}.path=FOLDER of a sequence classifier in safetensors files"
        load.refuse_unloadable(error, name, path, where, fix, MachineError)
