"""Checks a model by the files in its folder, without torch."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rloo_cli.config import hf_cache
from rloo_cli.config.pasted import paste_setting
from rloo_cli.config.schema import GenerationConfig, ModelConfig
from rloo_cli.utils.errors import Problem, value_problem
from rloo_cli.utils.files import JsonObject

# Every tokenizer's folder has one of these.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
OTHER_HEADS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM",
    "ForMultipleChoice", "RewardModel",
)  # fmt: skip
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NO_ROUTER_REPLAY = (
    "rounding differences between sampler and trainer can change its router's choice of experts,"
    " and so a token's probability; the router's choices are not replayed"
)
LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


# Arguments of from_pretrained that are keys here, or set by the run.
RESERVED_INIT_KWARGS = {
    "dtype": "model.dtype", "torch_dtype": "model.dtype", "revision": "model.revision",
    "attn_implementation": "model.attn_implementation", "config": "model.path",
    "trust_remote_code": "model.trust_remote_code", "device_map": "distributed.engine",
    "quantization_config": "model.quantization", "load_in_4bit": "model.quantization",
    "load_in_8bit": "model.quantization", "use_safetensors": "nothing: pickles are refused",
    "output_loading_info": "nothing: missing tensors are an error", "num_labels": "nothing",
    "state_dict": "model.path", "tp_plan": "distributed.engine",
}  # fmt: skip
# Arguments about finding and reading files, not about what the model computes.
LOADING_ARGUMENTS = (
    "cache_dir", "force_download", "local_files_only", "token", "subfolder", "variant",
    "low_cpu_mem_usage", "use_cache", "weights_only", "proxies",
)  # fmt: skip


def init_kwargs_problems(model: ModelConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """Arguments in model.init_kwargs that other keys set, or that a sampler would not see."""
    for name in model.init_kwargs:
        if name in RESERVED_INIT_KWARGS:
            what = f"model.init_kwargs.{name} is set by rloo"
            fix = f"remove model.init_kwargs.{name}"
            why = f"set by {RESERVED_INIT_KWARGS[name]}"
            yield Problem(what, "model.init_kwargs", why, fix)
    if not generation.is_engine:  # the trainer's weights sample
        return
    section, extra = generation.section, generation.own_keys.extra
    overrides = extra.get("hf_overrides") or extra.get("hf-overrides") or {}
    for name, value in model.init_kwargs.items():
        plain = name in LOADING_ARGUMENTS or name in RESERVED_INIT_KWARGS
        if not plain and overrides.get(name) != value:
            what = f"{generation.backend} would sample without model.init_kwargs.{name}"
            why = "vLLM reads the model's config.json by itself"
            fix = paste_setting(f"generation.{section}.extra", {"hf_overrides": {name: value}})
            yield Problem(what, "model.init_kwargs", why, fix + ", or generation=transformers")


def model_file_problems(
    model: ModelConfig, needs_reference: bool, allow_moe: bool
) -> Iterator[Problem]:
    """Problems of the policy and its reference, as far as their files show.

    `needs_reference`: the algorithm needs one. `allow_moe`: generation.allow_moe.
    """
    policy = _values(model.path, model.revision)
    yield from _head_problems("model.path", model.path, policy)
    yield from expert_problems(model, allow_moe)
    if model.ref_path is not None and needs_reference:
        reference = _values(model.ref_path)
        yield from _head_problems("model.ref_path", model.ref_path, reference)
        ours, theirs = _vocabulary(policy), _vocabulary(reference)
        if ours and theirs and ours != theirs:
            why = f"the policy has {ours} tokens, the reference {theirs}"
            what = "policy and reference differ in vocabulary"
            fix = "model.ref_path=ORG/NAME or a folder, of a model with the policy's tokens"
            yield Problem(what, "model.ref_path", why, fix)
    yield from _tokenizer(model)


def _head_problems(key: str, path: str, values: JsonObject) -> Iterator[Problem]:
    if why := wrong_head_reason(values):
        fix = "ORG/NAME or a folder, of a language model"
        yield value_problem(key, path, "is not a language model", fix, why)


def wrong_head_reason(values: JsonObject) -> str:
    """Why the weights of this config.json lack a language model head; "" = they may have one."""
    classes = [str(c) for c in values.get("architectures") or []]
    if classes and all(c.endswith(OTHER_HEADS) for c in classes):
        return f"its config.json has {classes[0]}: its head would be replaced"
    return ""


def uncounted_layers(values: JsonObject, unexpected: Iterable[str]) -> list[str]:
    """Names of `unexpected` tensors in layers beyond the number in config.json.

    Layers for multi-token prediction come after the others and are rightly dropped.
    """
    inner = values.get("text_config")
    text = inner if isinstance(inner, dict) else values
    count = text.get("num_hidden_layers") or text.get("n_layer") or text.get("num_layers")
    if not isinstance(count, int):
        return []
    count += int(text.get("num_nextn_predict_layers") or 0)
    matches = ((name, LAYER_NUMBER.search(name)) for name in unexpected)
    return sorted(name for name, match in matches if match and int(match[1]) >= count)


def expert_count_key(model: ModelConfig) -> str:
    """The key of the model's config.json that counts its experts; "" if it has none."""
    values = _values(model.path, model.revision)
    inner = values.get("text_config")
    known = inner if isinstance(inner, dict) else values
    return next((n for n in EXPERT_COUNTS if isinstance(known.get(n), int) and known[n] > 1), "")


def expert_problems(model: ModelConfig, allow_moe: bool) -> Iterator[Problem]:
    """A mixture of experts without generation.allow_moe, as far as the model's files show it."""
    if not allow_moe and (name := expert_count_key(model)):
        what = f"{model.path} is a mixture of experts ({name} in its config.json)"
        fix = "generation.allow_moe=true, or a dense model"
        yield Problem(what, "model.path", NO_ROUTER_REPLAY, fix)


def model_file_notes(model: ModelConfig, allow_moe: bool) -> list[str]:
    """Notes for the log: trained experts, and models whose own code is not used."""
    name = expert_count_key(model) if allow_moe else ""
    text = f"warning: model.path: training a mixture of experts ({name}), as generation.allow_moe"
    watch = "watch sampling/logp_diff_rms"
    notes = [f"{text} says: {NO_ROUTER_REPLAY}; {watch}"] if name else []
    models = {"model.path": model.path, "model.ref_path": model.ref_path}
    return notes + [
        f"warning: {key}: {path} has its own Python code (auto_map), which is not used:"
        " transformers' class is used instead (model.trust_remote_code=false)"
        for key, path in models.items()
        if path
        and not model.trust_remote_code
        and _values(path, model.revision if key == "model.path" else None).get("auto_map")
    ]


def _tokenizer(model: ModelConfig) -> Iterator[Problem]:
    key = "model.path" if model.tokenizer is None else "model.tokenizer"
    folder = Path(model.tokenizer or model.path).expanduser()
    try:
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    except OSError:
        return
    if not names or (key == "model.path" and "config.json" not in names):
        return  # not a model's folder: reported elsewhere
    if not names & {*TOKENIZER_FILES} and not any(n.endswith(".tiktoken") for n in names):
        why = f"{folder.absolute()} has none of {', '.join(TOKENIZER_FILES[:4])}, ..."
        yield Problem(f"{folder} has no tokenizer", key, why, "model.tokenizer=FOLDER or ORG/NAME")


def _values(path: str, revision: str | None = None) -> JsonObject:
    """A model's config.json; {} if unreadable, which `rules` reports."""
    try:
        return hf_cache.read_model_config(path, revision)
    except ValueError:
        return {}


def _vocabulary(values: JsonObject) -> int | None:
    inner = values.get("text_config")
    size = (inner if isinstance(inner, dict) else values).get("vocab_size")
    return size if isinstance(size, int) else None
