"""A reward model and its tokenizer, loaded; everything that is none is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.policy import load
from rloo_cli.policy.reward_scores import RewardModelScorer
from rloo_cli.utils.errors import MachineError, Problem, RunError
from rloo_cli.utils.files import JsonObject


def load_reward_tokenizer(key: str, config: Any) -> Any:
    """The reward model's own tokenizer, with a pad token. `key`: reward.NAME.

    Raises MachineError when it cannot be had, or has neither a pad nor an EOS token.
    """
    path = config.tokenizer or config.path
    where = f"{key}.tokenizer" if config.tokenizer else f"{key}.path"
    # The revision is that of `path`, and says nothing of another repository.
    revision = None if config.tokenizer else config.revision
    found = _load_pretrained_reward(
        AutoTokenizer.from_pretrained, path, where, key, config, revision=revision
    )
    if found.pad_token_id is None:
        if found.eos_token_id is None:
            what = f"the tokenizer of {path} has neither a pad token nor an EOS token"
            raise MachineError(
                Problem(what, where, "rows are padded", f"{key}.tokenizer=FOLDER of one that has")
            )
        found.pad_token = found.eos_token
    return found


def load_reward_model(
    key: str, config: Any, tokenizer: Any, device: torch.device
) -> RewardModelScorer:
    """The reward model, in eval mode and without gradients. `device`: that of device=auto.

    Raises MachineError for what cannot be had and for what is no reward model.
    """
    place = _reward_device(key, config.device, device)
    options: JsonObject = {
        "dtype": _reward_dtype(key, config.dtype, place),
        "revision": config.revision,
        "use_safetensors": True,
        "output_loading_info": True,
        **config.model_kwargs,
    }
    kind = AutoModelForSequenceClassification.from_pretrained
    found, info = _load_pretrained_reward(kind, config.path, f"{key}.path", key, config, **options)
    _check_reward_weights(key, config.path, found, info)
    found.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    found.config.pad_token_id = tokenizer.pad_token_id
    found.eval().requires_grad_(False)
    return RewardModelScorer(
        found,
        place,
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
        config.batch_size,
        config.offload,
    )


def _check_reward_weights(key: str, path: str, model: Any, loading_info: JsonObject) -> None:
    """Raises MachineError for weights that are not all there, and for several labels."""
    absent = sorted(
        [*loading_info["missing_keys"], *(m[0] for m in loading_info["mismatched_keys"])]
    )
    if absent:
        what = f"{path} lacks {len(absent)} of the tensors of a {type(model).__name__}"
        why = f"missing: {', '.join(absent[:5])}; they would be random numbers"
    elif model.config.num_labels != 1:
        what = f"{path} is not a reward model"
        why = f"it has {model.config.num_labels} labels; a reward model has one"
    else:
        return
    fix = f"{key}.path=ORG/NAME of a sequence classifier with one label"
    raise MachineError(Problem(what, f"{key}.path", why, fix))


def _reward_device(key: str, name: str, default: torch.device) -> torch.device:
    if name == "auto":
        return default
    found = torch.device(name)
    count = torch.cuda.device_count() if found.type == "cuda" else 1
    if found.type == "cuda" and (found.index or 0) >= count:
        what, why = f"{key}.device = {name} is not there", f"this machine has {count} GPUs"
        raise MachineError(Problem(what, f"{key}.device", why, f"{key}.device=auto"))
    return found


def _reward_dtype(key: str, name: str, device: torch.device) -> torch.dtype:
    try:
        return load.resolve_dtype(name, device)
    except MachineError as error:
        words = {"what": f"{key}.dtype = {name}", "where": f"{key}.dtype"}
        fix = f"{key}.dtype=float32"
        raise MachineError(*[replace(p, **words, fix=fix) for p in error.problems]) from None


def _load_pretrained_reward(
    call: Callable[..., Any], name: str, where: str, key: str, config: Any, **options: Any
) -> Any:
    """Call a `from_pretrained`, and turn its many errors into one that says what to do."""
    given = {"trust_remote_code": config.trust_remote_code, **options}
    path = synthetic.resolve_model_path(name)
    try:
        return call(path, **{k: v for k, v in given.items() if v is not None})
    except RunError:  # a signal's, which came meanwhile
        raise
    except Exception as error:  # what a damaged or a hostile file makes a library raise
        why = "\n".join(line[:300] for line in str(error).strip().splitlines()[:4])
        fix = f"on a machine with network: {hf_cache.fetch_command()}; or name a local folder"
        what = f"reward model {name!r} is not to be had"
        if "trust_remote_code" in str(error):
            what = f"{name} brings Python code of its own"
            fix = f"{key}.trust_remote_code=true, if you trust its authors; nothing was run"
        elif Path(path).exists():
            what, fix = f"reward model {name} cannot be loaded", ""
            fix = f"{key}.path=FOLDER of a sequence classifier in safetensors files"
        raise MachineError(Problem(what, where, why, fix)) from None
