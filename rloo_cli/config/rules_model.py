"""Checks a model by the files in its folder, without torch."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rloo_cli.config import hf_cache
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

# One of these is in the folder of every tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
OTHER_HEADS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM",
    "ForMultipleChoice", "RewardModel",
)  # fmt: skip
LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def model_file_problems(run: RunConfig) -> Iterator[Problem]:
    """What is wrong with the policy and its reference, as far as their files show it."""
    policy = _values(run.model.path, run.model.revision)
    if why := wrong_head_reason(policy):
        yield Problem(f"{run.model.path} is not a language model", "model.path", why)
    if run.model.ref_path is not None and run.algorithm.needs_reference:
        reference = _values(run.model.ref_path)
        if why := wrong_head_reason(reference):
            yield Problem(f"{run.model.ref_path} is not a language model", "model.ref_path", why)
        ours, theirs = _vocabulary(policy), _vocabulary(reference)
        if ours and theirs and ours != theirs:
            why = f"the policy knows {ours} tokens, the reference {theirs}"
            yield Problem("policy and reference differ in vocabulary", "model.ref_path", why)
    yield from _tokenizer(run)


def wrong_head_reason(values: JsonObject) -> str:
    """Why the weights of this config.json have no language model's head; "" = they may have one."""
    classes = [str(c) for c in values.get("architectures") or []]
    if classes and all(c.endswith(OTHER_HEADS) for c in classes):
        return f"its config.json says {classes[0]}: its head would be left out for another one"
    return ""


def uncounted_layers(values: JsonObject, unexpected: Iterable[str]) -> list[str]:
    """Names among `unexpected` tensors of layers beyond the number in the config.json.

    Layers for predicting several tokens at once come after the others, and are rightly left out.
    """
    inner = values.get("text_config")
    text = inner if isinstance(inner, dict) else values
    count = text.get("num_hidden_layers") or text.get("n_layer") or text.get("num_layers")
    if not isinstance(count, int):
        return []
    count += int(text.get("num_nextn_predict_layers") or 0)
    matches = ((name, LAYER_NUMBER.search(name)) for name in unexpected)
    return sorted(name for name, match in matches if match and int(match[1]) >= count)


def model_file_notes(run: RunConfig) -> list[str]:
    """Notes for the log: models that bring code which is not used."""
    models = {"model.path": run.model.path, "model.ref_path": run.model.ref_path}
    return [
        f"warning: {key}: {path} brings Python code of its own (auto_map), which is not used:"
        " transformers' class is (model.trust_remote_code=false)"
        for key, path in models.items()
        if path
        and not run.model.trust_remote_code
        and _values(path, run.model.revision if key == "model.path" else None).get("auto_map")
    ]


def _tokenizer(run: RunConfig) -> Iterator[Problem]:
    key = "model.path" if run.model.tokenizer is None else "model.tokenizer"
    folder = Path(run.model.tokenizer or run.model.path).expanduser()
    try:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    except OSError:
        return
    if not names or (key == "model.path" and "config.json" not in names):
        return  # not a folder, or not a model's: that is reported elsewhere
    if not names & {*TOKENIZER_FILES} and not any(n.endswith(".tiktoken") for n in names):
        why = f"{folder.absolute()} has none of {', '.join(TOKENIZER_FILES[:4])}, ..."
        yield Problem(f"{folder} has no tokenizer", key, why, "model.tokenizer=FOLDER or ORG/NAME")


def _values(path: str, revision: str | None = None) -> JsonObject:
    """A model's config.json; {} for one that cannot be read, which `rules` reports."""
    try:
        return hf_cache.read_model_config(path, revision)
    except ValueError:
        return {}


def _vocabulary(values: JsonObject) -> int | None:
    inner = values.get("text_config")
    size = (inner if isinstance(inner, dict) else values).get("vocab_size")
    return size if isinstance(size, int) else None
