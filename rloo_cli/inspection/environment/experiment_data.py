"""A run's data and rewards as loaded: rows, columns, one row as raw text, and signatures.

Downloads nothing and imports no torch: hub data is only read from the cache. Large inputs are read
in part: generated tasks, mapped rows and large files.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.config.schema import DataConfig, RunConfig
from rloo_cli.data import dataset, splits
from rloo_cli.data.dataset import OpenedSplit
from rloo_cli.data.image_prompts import shows_images
from rloo_cli.data.image_rules import check_image_run
from rloo_cli.distributed import device_count
from rloo_cli.inspection.environment.check_lines import CheckLines
from rloo_cli.rewards.engine.arguments import REWARD_KWARGS
from rloo_cli.rewards.engine.build import Reward, build_reward
from rloo_cli.rewards.engine.columns import check_reward_splits
from rloo_cli.utils import paths
from rloo_cli.utils.errors import RunError

PROBE_ROWS = 16  # to generate, to map, or to read from a large file
LARGE_FILE_BYTES, QUICK_FILE_BYTES = 256e6, 16e6  # of doctor, of a dry run
SHOWN_CHARACTERS = 100  # of each value of a row
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"


def check_data_rows(lines: CheckLines, run: RunConfig) -> dict[str | None, OpenedSplit]:
    """Open every local split, show its columns and first row. -> the opened ones

    A split that is only on a hub is a warning; an unreadable one is a failure.
    """
    opened: dict[str | None, OpenedSplit] = {}
    sources = splits.split_configs(run, training=True)
    with _cache_alone():
        for key, source in sources.items():
            name = _data_name(key)
            if not _is_here(source):
                lines.add_warning(name, _not_here_text(source), hf_cache.fetch_command())
                continue
            with lines.noting_refusal(name), splits.errors_naming_split(key, source):
                probe = _probe_config(source)
                opened[key] = dataset.open_split(probe, probe.split)
                _describe_split(lines, name, source, opened[key], whole=probe == source)
    with lines.noting_refusal("images"):
        if _shows_images(sources, opened):
            check_image_run(run, bool(device_count.visible_gpus()))
    return opened


def check_first_rows(run: RunConfig) -> list[str]:
    """Open the first rows of every local split, and build the rewards, as a start does.

    -> a line for each split that is only on a hub. Raises the errors of a start. A user's reward is
    imported: its file runs.
    """
    opened: dict[str | None, OpenedSplit] = {}
    notes = []
    sources = splits.split_configs(run, training=True)
    is_any_here = any(map(_is_here, sources.values()))  # else `datasets` is not imported
    with _cache_alone() if is_any_here else nullcontext():
        for key, source in sources.items():
            if not _is_here(source):
                notes.append(f"{_data_name(key):<10} {_not_here_text(source)}")
                continue
            with splits.errors_naming_split(key, source):
                probe = _probe_config(source, QUICK_FILE_BYTES)
                opened[key] = dataset.open_split(probe, probe.split)
        rewards = [build_reward(name, entry) for name, entry in run.rewards.items()]
        if _has_training_splits(sources, opened):
            check_reward_splits(run, opened, rewards)
        if _shows_images(sources, opened):
            check_image_run(run, None)
    return notes


def _shows_images(
    sources: Mapping[str | None, DataConfig], opened: Mapping[str | None, OpenedSplit]
) -> bool:
    """Whether the first rows of a split show images. Raises RunError."""
    for key, source in sources.items():
        if key in opened:
            rows = opened[key].dataset
            with splits.errors_naming_split(key, source):
                if shows_images(rows.select(range(min(len(rows), PROBE_ROWS))), source):
                    return True
    return False


def _has_training_splits(
    wanted: Iterable[str | None], opened: Mapping[str | None, OpenedSplit]
) -> bool:
    """Whether the split, or all sources of the mixture, that the run trains on could be opened."""
    return opened.keys() >= {k for k in wanted if k is None or splits.is_mixture_key(k)}


def _not_here_text(source: DataConfig) -> str:
    return f"{source.path} is not in the cache, so its rows were not checked"


def _data_name(key: str | None) -> str:
    if key is None:
        return "data"
    return key if splits.is_mixture_key(key) else f"eval.sets.{key}" if key else "data.eval_split"


def _is_here(source: DataConfig) -> bool:
    path = source.path or ""
    if not synthetic.is_hub_name(path):
        return True
    return hf_cache.is_in_hub_cache(path, source.revision, "dataset")


@contextmanager
def _cache_alone() -> Iterator[None]:
    """While inside, `datasets` contacts no hub, and streams without torch."""
    before = os.environ.get(OFFLINE_VARIABLE)
    os.environ[OFFLINE_VARIABLE] = "1"  # huggingface_hub reads it when it is imported
    try:
        from datasets import config
        from huggingface_hub import constants

        kept = config.HF_HUB_OFFLINE, config.TORCH_AVAILABLE, constants.HF_HUB_OFFLINE
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        config.TORCH_AVAILABLE = False
        try:
            yield
        finally:
            config.HF_HUB_OFFLINE, config.TORCH_AVAILABLE, constants.HF_HUB_OFFLINE = kept
    finally:
        os.environ.pop(OFFLINE_VARIABLE)
        if before is not None:
            os.environ[OFFLINE_VARIABLE] = before


def _probe_config(source: DataConfig, large: float = LARGE_FILE_BYTES) -> DataConfig:
    """The source, shortened if reading all of it would take long. `large`: bytes of a file."""
    changes: dict[str, Any] = {}
    few = min(source.max_samples or PROBE_ROWS, PROBE_ROWS)
    path = Path(source.path or "").expanduser()
    if source.task is not None and (source.path or "").startswith(synthetic.TASK_PREFIX):
        sizes = {n: min(getattr(source.task, n), PROBE_ROWS) for n in ("size", "eval_size")}
        changes["task"] = source.task.model_copy(update=sizes)
    if path.is_file() and path.stat().st_size > large:
        split = re.split(r"[+\[]", source.split)[0].strip()  # a part requires the whole
        changes |= {"streaming": True, "max_samples": few, "split": split}
    elif source.streaming or (source.map is not None and source.filter is None):
        changes["max_samples"] = few
    return source.model_copy(update=changes) if changes else source


def _describe_split(
    lines: CheckLines, name: str, source: DataConfig, opened: OpenedSplit, whole: bool
) -> None:
    rows = opened.dataset
    count = f"{len(rows):,} rows" if whole else f"the first {len(rows)} rows were read"
    left = f", {opened.filtered_out} removed by data.filter" if opened.filtered_out else ""
    columns = ", ".join(opened.column_names)
    lines.add_ok(name, f"{source.path} [{source.split}]: {count}{left}; columns: {columns}")
    lines.add_ok(f"{name} row 0", "  ".join(f"{k}={_raw_text(v)}" for k, v in rows[0].items()))


def _raw_text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def check_reward_signatures(
    lines: CheckLines, run: RunConfig, opened: Mapping[str | None, OpenedSplit]
) -> list[Reward]:
    """Build every reward and compare its arguments with the columns. -> the built ones

    A user's reward is imported: its file runs.
    """
    rewards = []
    has_rows = _has_training_splits(splits.split_configs(run, training=True), opened)
    for name, entry in run.rewards.items():
        label = f"reward {name}"
        try:
            reward = build_reward(name, entry)
            rewards.append(reward)
            if has_rows:
                check_reward_splits(run, opened, [reward])
        except RunError as error:
            for problem in error.problems:
                lines.add_problem(label, problem)
            continue
        lines.add_ok(label, _describe_reward(reward))
    return rewards


def _describe_reward(reward: Reward) -> str:
    """Location of its code, its arguments, the columns it needs, and its weight."""
    names, fixed = reward.parameter_names, reward.fixed_arguments.keys()
    takes = "takes everything"
    if names is not None:
        takes = f"takes {', '.join(sorted(names - fixed))}"
    columns = [c for c in dict.fromkeys(reward.required_columns) if c not in REWARD_KWARGS]
    needs = f"needs the column{'s' * (len(columns) > 1)} {', '.join(columns)}" if columns else ""
    where = reward.location
    for root in (f"{Path.cwd()}{os.sep}", f"{paths.PACKAGE.parent}{os.sep}"):
        where = where.removeprefix(root)
    parts = [where, takes, needs or "needs no columns", f"weight {reward.config.weight:g}"]
    return "; ".join(parts)
