"""Reads the Hugging Face cache without torch, transformers or any call to the network.

The cache decides whether a run can start without a network. A cached model's config.json has limits
that a config is checked against.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rloo_cli.utils.files import JsonObject

# More than any model has; building a model from such a config.json would fill the memory.
MAX_MODEL_SIZES = {
    "hidden_size": 2**18, "n_embd": 2**18, "intermediate_size": 2**21, "vocab_size": 2**24,
    "num_hidden_layers": 2000, "n_layer": 2000, "num_attention_heads": 4096, "n_head": 4096,
    "num_key_value_heads": 4096, "head_dim": 2**14, "num_experts": 2**14,
    "num_local_experts": 2**14,
}  # fmt: skip
ADAPTER_CONFIG_FILE = "adapter_config.json"  # of a folder that peft wrote
HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")  # org/name, or name


def is_hub_name(path: str) -> bool:
    """Whether this can be the name of a repository on a hub."""
    return bool(HUB_NAME.fullmatch(path)) and ".." not in path and path.strip("./-") != ""


def is_hub_offline() -> bool:
    """Whether the environment forbids network access to Hugging Face's libraries."""
    values = (os.environ.get(n, "") for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(v.upper() in ("1", "ON", "YES", "TRUE") for v in values)


def hub_cache_folder() -> Path:
    """The folder of downloaded repositories, as huggingface_hub finds it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(hub or os.path.join(home, "hub")).expanduser()


def snapshot_folder(name: str, revision: str | None = None, kind: str = "model") -> Path | None:
    """The folder of a repository's cached revision (None = main); None if it is not cached."""
    if revision is not None and (".." in revision or revision.startswith("/")):
        return None  # a path, which could leave the cache
    folder = hub_cache_folder() / f"{kind}s--{name.replace('/', '--')}"
    ref = folder / "refs" / (revision or "main")
    try:
        commit = ref.read_text().strip() if ref.is_file() else revision
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit if commit else None
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def is_in_hub_cache(name: str, revision: str | None, kind: str) -> bool:
    """Whether a revision of this repository is cached, or of a data set at least its tables."""
    if snapshot_folder(name, revision, kind) is not None:
        return True
    home = os.environ.get("HF_HOME") or hub_cache_folder().parent
    tables = os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets")
    return kind == "dataset" and (Path(tables).expanduser() / name.replace("/", "___")).is_dir()


@contextmanager
def recorded_command(arguments: Iterable[str]) -> Iterator[None]:
    """Inside, the user's arguments are kept for error messages of worker processes."""
    before = os.environ.get("RLOO_WORDS")
    os.environ["RLOO_WORDS"] = shlex.join(arguments)
    try:
        yield
    finally:
        os.environ.pop("RLOO_WORDS")
        if before is not None:
            os.environ["RLOO_WORDS"] = before


def fetch_command() -> str:
    """The command that downloads what the current run needs."""
    return f"rloo fetch {os.environ.get('RLOO_WORDS') or '+recipe=NAME'}"


def read_model_config(path: str, revision: str | None = None) -> JsonObject:
    """A model's config.json, from its folder or the cache; {} if there is none.

    Raises ValueError for one that is not a JSON mapping.
    """
    folder: Path | None = Path(path).expanduser()
    if folder is not None and not folder.exists():
        folder = snapshot_folder(path, revision) if is_hub_name(path) else None
    file = folder / "config.json" if folder is not None else None
    if file is None or not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a mapping")
    return values


def adapter_base_path(path: str) -> str | None:
    """The base model of the adapter in this folder; None if the folder holds no adapter."""
    folder = Path(path).expanduser()
    file = folder / ADAPTER_CONFIG_FILE
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    try:
        base = json.loads(file.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return base if isinstance(base, str) and base else None


def read_context_length(values: JsonObject) -> int | None:
    """The context length in a config.json of a language model; None if it has none.

    Raises ValueError for an impossible number.
    """
    text = values.get("text_config")
    inner = text if isinstance(text, dict) else values
    length = inner.get("max_position_embeddings") or inner.get("n_positions")
    if length is None:
        return None
    if not isinstance(length, int) or isinstance(length, bool) or not 0 < length < 2**31:
        raise ValueError(f"max_position_embeddings = {str(length)[:40]}, which is not possible")
    return length


def model_config_problem(values: JsonObject) -> str:
    """Why this config.json must not be built as a model; "" = it can be built.

    Impossible sizes are refused. So is attention from a hub: that is Python code, and refused even
    with model.trust_remote_code.
    """
    text = values.get("text_config")
    for part in (values, text) if isinstance(text, dict) else (values,):
        for name, most in MAX_MODEL_SIZES.items():
            size = part.get(name)
            if isinstance(size, int) and not 0 < size <= most:
                return f"{name} = {str(size)[:40]}, which is not possible"
        for name in ("attn_implementation", "_attn_implementation"):
            if "/" in str(part.get(name, "")):
                return f"{name} = {str(part[name])[:80]!r} is code from a hub"
    return ""
