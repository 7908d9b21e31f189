"""A reward model: any sequence classifier with one label, with its own tokenizer.

The model reads prompt and completion as text, in float32, right-padded, a few rows at a time. A
completion that ended by itself is read with the end-of-text token that such models were trained
on (`keep_eos`); special tokens are gone from the text otherwise, and the score would be of a
text that goes on.
"""

from functools import lru_cache
from typing import Any, Literal

from rloo_cli import hub, made
from rloo_cli.errors import ConfigError, MachineError, Problem
from rloo_cli.rewards.text import Completion, texts
from rloo_cli.schema import Positive, RewardConfig, key


class Config(RewardConfig):
    type: Literal["model"] = key("model")
    path: str = key("Hub name or folder of the reward model, or make:tiny_reward")
    tokenizer: str | None = key("Hub name or folder of its tokenizer; null = path")
    revision: str | None = key("Branch, tag or commit of a hub model")
    keep_eos: bool = key("End a completion that ended by itself with the tokenizer's EOS")
    batch_size: Positive = key("Rows per forward pass")
    max_length: Positive | None = key("Most tokens of a row; longer ones lose their beginning")


def score(
    prompts: list[Any], completions: list[Completion], finish_reasons: list[str], config: Config
) -> list[float]:
    """(B,) scores. Raises MachineError when the model cannot be had, ConfigError if it is none."""
    import torch

    model, tokenizer = _load(config.path, config.tokenizer, config.revision)
    ended = [reason == "stop" and config.keep_eos for reason in finish_reasons]
    rows = [
        _ids(prompt, completion, end, tokenizer, config.max_length)
        for prompt, completion, end in zip(prompts, completions, ended, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # like lengths pad little
    scores = [0.0] * len(rows)
    for start in range(0, len(order), config.batch_size):
        chosen = order[start : start + config.batch_size]
        with torch.no_grad():
            found = _forward(model, [rows[i] for i in chosen], torch)
        for i, value in zip(chosen, found, strict=True):
            scores[i] = value
    return scores


def _forward(model: Any, rows: list[list[int]], torch: Any) -> list[float]:
    width = max(map(len, rows))
    pad = model.config.pad_token_id
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    mask = torch.arange(width, device=model.device) < lengths[:, None]
    hidden = model.base_model(input_ids=ids, attention_mask=mask.long())[0]
    # Read at the last real token by its place: the class itself looks for the pad id, which may
    # also be the EOS at the end of a row.
    last = hidden[torch.arange(len(rows), device=model.device), lengths - 1]
    values: list[float] = _head(model)(last).float().squeeze(-1).tolist()
    return values


def _head(model: Any) -> Any:
    for name in ("score", "classifier", "v_head"):
        if hasattr(model, name):
            return getattr(model, name)
    raise ConfigError(f"{type(model).__name__} has no score head that rloo knows")


def _ids(prompt: Any, completion: Completion, ended: bool, tokenizer: Any, most: int | None) -> Any:
    """The exact ids the model is fed for one row."""
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt + texts([completion])[0])["input_ids"])
        ids += [tokenizer.eos_token_id] if ended and tokenizer.eos_token_id is not None else []
    else:
        assert isinstance(completion, list)
        text = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids[-most:] if most else ids


@lru_cache(maxsize=8)
def _load(path: str, tokenizer: str | None, revision: str | None) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    options = {"revision": revision} if revision else {}
    try:
        tokens = AutoTokenizer.from_pretrained(made.folder(tokenizer or path), **options)
        model = AutoModelForSequenceClassification.from_pretrained(
            made.folder(path), dtype=torch.float32, use_safetensors=True, **options
        )
    except (OSError, ValueError) as error:
        what, why = (
            f"reward model {path!r} is not to be had",
            "\n".join(str(error).splitlines()[:3]),
        )
        fix = f"on a machine with network: {hub.fetch_command()}; or name a local folder"
        raise MachineError(Problem(what, "", why, fix)) from None
    if model.config.num_labels != 1:
        why = f"it has {model.config.num_labels} labels; a reward model has one"
        raise ConfigError(Problem(f"{path} is not a reward model", why=why))
    if tokens.pad_token_id is None:
        tokens.pad_token = tokens.eos_token
    model.config.pad_token_id = tokens.pad_token_id
    model.eval().requires_grad_(False)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokens
