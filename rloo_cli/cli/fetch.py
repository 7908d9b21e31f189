"""`rloo fetch +recipe=NAME`: download what a run loads, so that it can start offline.

Downloads models as safetensors, configs and tokenizers: no pickles, and Python code only if the
config trusts it. Cached files are not downloaded again; make:NAME models are built.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.cli import answers
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check, compose, hf_cache, synthetic
from rloo_cli.config.rules_paths import NamedPath, named_paths
from rloo_cli.config.schema import DataConfig, RunConfig
from rloo_cli.data import dataset
from rloo_cli.utils.errors import MachineError, RunError, refuse

TOKENIZER_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
MODEL_PATTERNS = (*TOKENIZER_PATTERNS, "*.safetensors")


@dataclass(frozen=True)
class Artifact:
    """One model, tokenizer or split that a run loads."""

    key: str  # the config's
    path: str
    kind: str  # model, tokenizer or dataset
    revision: str | None
    trust_remote_code: bool = False  # fetch its Python code too


def run(args: list[str]) -> int:
    """The verb. Raises RunError with everything not found, and the first one's exit code.

    The code is 3 for failed downloads, 4 for data that does not match the config.
    """
    options = parse_verb("fetch", args)
    composed = compose.compose_config(options.overrides)
    settings = check.check_config(composed)
    lost: list[RunError] = []
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries, line by line
    with answers.json_answer(options.json) as answer:
        with hf_cache.recorded_command(composed.user_overrides):
            answer["fetched"] = list(_fetch_everything(settings, lost))
        if lost:
            raise type(lost[0])(*dict.fromkeys(p for error in lost for p in error.problems))
    return 0


def _fetch_everything(settings: RunConfig, lost: list[RunError]) -> Iterator[dict[str, str]]:
    """Fetch each thing, and print a line about it; add errors to `lost`."""

    def shown(key: str, path: str, size: str, location: object) -> dict[str, str]:
        print(f"{key:<22} {path:<40} {size:>9}  {location}", flush=True)
        return {"key": key, "path": path, "size": size, "place": str(location)}

    for thing in required_artifacts(named_paths(settings), settings.model.trust_remote_code):
        try:
            location, note = _fetch_artifact(thing)
            yield shown(thing.key, thing.path, note, location)
        except RunError as error:
            lost.append(error)
    for key, rows in _load_splits(settings.data, settings.held_out, lost):
        yield shown(key, rows.path, rows.size, rows.cache_dir)


def required_artifacts(named: Iterable[NamedPath], trust_remote_code: bool) -> list[Artifact]:
    """Every model and tokenizer of a run, each once. `trust_remote_code`: for the policy."""
    found: dict[tuple[str, str | None, str], Artifact] = {}
    for key, path, revision, of in named:
        if of == "model":
            kind = "tokenizer" if key.endswith(".tokenizer") else "model"
            trusted = trust_remote_code and key.startswith("model.")
            found.setdefault((path, revision, kind), Artifact(key, path, kind, revision, trusted))
    return list(found.values())


def _fetch_artifact(artifact: Artifact) -> tuple[Path, str]:
    """Fetch an artifact. -> its path and size. Raises MachineError."""
    if not synthetic.is_hub_name(artifact.path):
        folder = Path(synthetic.resolve_model_path(artifact.path))
    else:
        folder = Path(_download_snapshot(artifact))
        if artifact.kind == "model" and not [*folder.glob("*.safetensors")]:
            why = f"found none in {folder}; other formats are pickles, which run code when loaded"
            fix = f"{artifact.key}=NAME, a model with safetensors files"
            what = f"{artifact.path} has no safetensors"
            refuse(artifact.key, what, fix, why, error=MachineError)
    return folder, _format_size(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))


def _download_snapshot(artifact: Artifact) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = [
        *(TOKENIZER_PATTERNS if artifact.kind == "tokenizer" else MODEL_PATTERNS),
        *["*.py"] * artifact.trust_remote_code,
    ]
    try:
        return snapshot_download(
            artifact.path,
            revision=artifact.revision,
            allow_patterns=wanted,
            ignore_patterns=["*/*"],
        )
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        what, fix = f"{artifact.key} = {artifact.path!r} could not be downloaded", _fetch_advice()
        if isinstance(error, GatedRepoError):
            page = f"https://huggingface.co/{artifact.path}"
            what, fix = (
                f"{artifact.path} is gated",
                f"accept its terms at {page}, and export HF_TOKEN=...",
            )
        refuse(artifact.key, what, fix, _failure_reason(error), error=MachineError)


def _failure_reason(error: Exception) -> str:
    searched = f"not in the cache {hf_cache.hub_cache_folder()}"
    if hf_cache.is_hub_offline():
        return f"HF_HUB_OFFLINE is set, and it is {searched}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "\n".join([searched, *lines[:3]])[:600]


def _fetch_advice() -> str:
    without = ", without HF_HUB_OFFLINE" if hf_cache.is_hub_offline() else ""
    return (
        f"on a machine with network{without}, into this cache (HF_HOME): {hf_cache.fetch_command()}"
    )


@dataclass(frozen=True)
class LoadedSplit:
    """A split that was loaded once and is therefore cached."""

    path: str
    size: str
    cache_dir: str


def _load_splits(
    data: DataConfig, held_out: Mapping[str, DataConfig], errors: list[RunError]
) -> Iterator[tuple[str, LoadedSplit]]:
    """Load every split that a run reads; add errors to `errors`."""
    sources = data.mixture_sources
    training = {f"data.mixture.{n}": s for n, s in sources.items()} or {"data": data}
    wanted: list[tuple[str, Any, str]] = [(key, of, of.split) for key, of in training.items()]
    for name, held in held_out.items():
        wanted.append((f"eval.sets.{name}" if name else "data.eval_split", held, held.split))
    gone: set[str] = set()
    for key, of, split in wanted:
        if of.path in gone:
            continue  # another split would fail after the same wait
        try:
            rows = dataset.load_split(of, split)
        except RunError as error:
            errors.append(error)
            gone |= {of.path} if isinstance(error, MachineError) else set()
            continue
        files = [Path(f["filename"]) for f in rows.cache_files]
        location = str(files[0].parent) if files else "generated on reading"
        yield key, LoadedSplit(f"{of.path} [{split}]", f"{len(rows)} rows", location)


def _format_size(count: float) -> str:
    units = ["B", "kB", "MB", "GB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"
