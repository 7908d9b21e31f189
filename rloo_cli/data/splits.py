"""The data of a run: the split it trains on and the held-out sets, opened, checked, tokenized.

Keys of the mappings here: None for the training split, else the name of a held-out set ("" for
the one of data.eval_split); before sources are joined, data.mixture.NAME for a source of a mixture.
Errors about a set or a source name its own keys.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rloo_cli.config.prompt_limit import describe_prompt_limit, max_prompt_tokens, prompt_headroom
from rloo_cli.config.schema import DataConfig, RunConfig, SetConfig
from rloo_cli.data import dataset, mixture
from rloo_cli.data.cache import ONE_PROCESS, Ranks, shared_folder
from rloo_cli.data.dataset import OpenedSplit
from rloo_cli.data.prompts import FIRST_PROMPTS, Prompts, tokenize_prompts
from rloo_cli.data.render import ToolsOf
from rloo_cli.data.vocabulary import answer_budget_ids
from rloo_cli.utils.errors import ConfigError, DataError, Problem, RunError, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.vision_processor import VisionProcessor

BAR_CHARACTERS, MAX_BARS = "▁▂▃▄▅▆▇█", 16


def describe_lengths(lengths: Sequence[int], limits: Sequence[int] = ()) -> str:
    """The distribution as `prompt tokens: 12 |▁▃▇▅▂| 498, median 214, 95 % up to 430`.

    All bars are equally wide. `limits`: the most tokens a prompt may have. If some prompts have
    more, the text says how many.
    """
    ordered = sorted(lengths)
    median, most = _length_quantile(ordered, 0.5), _length_quantile(ordered, 0.95)
    bars = f"{ordered[0]} |{_bars(ordered)}| {ordered[-1]}"
    text = f"prompt tokens: {bars}, median {median}, 95 % up to {most}"
    over = sum(n > min(limits) for n in lengths) if limits else 0
    return text + (f"; {over} over {' or '.join(map(str, limits))}" if over else "")


def _length_quantile(ordered: Sequence[int], share: float) -> int:
    """The least length that at least this share of the prompts does not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _bars(ordered: Sequence[int]) -> str:
    low, span = ordered[0], ordered[-1] - ordered[0] + 1
    width = min(MAX_BARS, span)
    counts = [0] * width
    for n in ordered:
        counts[(n - low) * width // span] += 1
    # A non-empty bar must be visible.
    heights = [(c * len(BAR_CHARACTERS) - 1) // max(counts) for c in counts]
    return "".join(BAR_CHARACTERS[h] if c else " " for c, h in zip(counts, heights, strict=True))


SplitValue = TypeVar("SplitValue")
MIXTURE_PREFIX = "data.mixture."
SHOWN_TEXT, SHOWN_TOKENS = 300, 5  # characters and tokens of each end of a prompt
DATA_KEY = re.compile(rf"\bdata\.(?=(?:{'|'.join(SetConfig.model_fields)})\b)")


def open_splits(
    config: RunConfig, training: bool = True, ranks: Ranks = ONE_PROCESS
) -> dict[str | None, OpenedSplit]:
    """Open every split that the run needs. Raises DataError, MachineError.

    Rank 0 reads files and calls user functions; the others use its results.
    """
    sources = split_configs(config, training)

    def open_all(shared: Path | None) -> dict[str | None, OpenedSplit]:
        opened: dict[str | None, OpenedSplit] = {}
        if shared and not shared.is_dir():  # on another machine's disk
            shared = None
        for number, (name, source) in enumerate(sources.items()):
            file = shared and shared / str(number)
            with errors_naming_split(name, source):
                opened[name] = dataset.open_split(source, source.split, shared=file)
        return opened

    if not any(map(dataset.calls_user_code, sources.values())):
        return ranks.rank0_first(lambda: open_all(None))
    with shared_folder(ranks) as shared:
        return ranks.rank0_first(lambda: open_all(shared))


def tokenize_splits(
    config: RunConfig,
    opened: Mapping[str | None, OpenedSplit],
    tokenizer: "PreTrainedTokenizerBase",
    context_length: int | None,
    tools_of: ToolsOf | None = None,
    vocab_size: int | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> dict[str | None, Prompts]:
    """Tokenize every split's prompts. `context_length`: the model's most positions, if known.

    `tools_of`: the descriptions of an example's tools; None = there are no tools. `vocab_size`: of
    the model's embedding, if known.

    Raises ConfigError if no tokens are left for completions, DataError for prompts that do not fit
    and for a rank whose rows differ from rank 0's.
    """
    if context_length is not None and context_length <= config.generation.max_completion_length:
        raise ConfigError(_no_headroom(config.generation.max_completion_length, context_length))
    answer_budget_ids(tokenizer, config.generation)
    headroom = prompt_headroom(config.generation, context_length)
    template_kwargs = config.generation.chat_template_kwargs

    @cache
    def load_vision() -> "VisionProcessor":
        from rloo_cli.data.vision_processor import load_vision_processor  # lazy: it imports torch

        return load_vision_processor(config.model, tokenizer)

    prompts: dict[str | None, Prompts] = {}
    for name, source in split_configs(config, training=True).items():
        if name not in opened:
            continue
        max_length = max_prompt_tokens(config.generation, [source], context_length)
        with errors_naming_split(name, source):
            prompts[name] = tokenize_prompts(
                opened[name].dataset, source, tokenizer, template_kwargs, max_length, config.seed,
                headroom, tools_of, load_vision, vocab_size, ranks,
            )  # fmt: skip
            prompts[name].filtered_out = opened[name].filtered_out
            prompts[name].value_notes = (*opened[name].notes, *prompts[name].value_notes)
    for name, source in split_configs(config, training=True).items():
        if name in prompts:
            with errors_naming_split(name, source):
                _refuse_other_rows(ranks.gather(prompts[name].fingerprint))
    parts = mixture_entries(prompts)
    if parts:
        mixed = mixture.join_prompts(parts, config.data.mixture_weights, config.seed)
        return {None: mixed, **{k: p for k, p in prompts.items() if not is_mixture_key(k)}}
    return prompts


def _refuse_other_rows(fingerprints: Sequence[str]) -> None:
    """Raise DataError for a rank whose rows are not rank 0's: it would draw other prompts."""
    others = [rank for rank, found in enumerate(fingerprints) if found != fingerprints[0]]
    if others:
        what = f"rank {others[0]} and rank 0 have different rows"
        why = "the fingerprints of their data differ, so they would draw different prompts"
        fix = "put the same files on all machines, and share RLOO_CACHE"
        more = "data.map and data.filter are called on rank 0, which writes the rows to RLOO_CACHE"
        refuse("data.path", what, fix, why, more=more, error=DataError)


def is_mixture_key(name: str | None) -> bool:
    """Whether this key names a source of data.mixture."""
    return name is not None and name.startswith(MIXTURE_PREFIX)


def mixture_entries(by_key: Mapping[str | None, SplitValue]) -> dict[str, SplitValue]:
    """The entries of the mixture's sources only, by the sources' names."""
    prefix = MIXTURE_PREFIX
    return {k.removeprefix(prefix): v for k, v in by_key.items() if k and k.startswith(prefix)}


def split_notes(name: str | None, prompts: Prompts) -> list[str]:
    """Lines about a split for the log. `name`: of a held-out set; None = the training split."""
    kind = "conversations" if prompts.conversational else "plain text"
    lengths = prompts.lengths
    sizes = f"{len(prompts)} prompts, {kind}, {lengths.min()} to {lengths.max()} tokens"
    if name is not None:
        notes = [f"held out{f', {name}' if name else ''}: {sizes}"]
    else:
        notes = [sizes]
        notes += mixture.mixture_notes(prompts.mixture) if prompts.mixture else []
        notes += [_all_lengths(prompts)]
    where = "" if name is None else f" of {name or 'the held-out set'}"
    if prompts.bad_images:
        notes.append(f"{prompts.bad_images} rows{where} were left out (data.on_bad_image)")
    notes += prompts.value_notes
    if prompts.filtered_out:
        notes.append(f"{prompts.filtered_out} rows{where} were left out (data.filter)")
    for count, what in ((prompts.dropped, "left out"), (prompts.truncated, "cut on the left")):
        if count:
            limit = f"more than {' or '.join(map(str, prompts.length_limits))} tokens"
            text = f"{count} prompts{where} were too long and {what} (data.overlong): {limit}"
            notes.append(f"{text} (data.max_prompt_length)")
    some = prompts.prompt_ids[:FIRST_PROMPTS]
    alike = len({tuple(ids) for ids in some}) == 1 and not prompts.media
    if name is None and len(prompts) > 100 and alike:
        which = "all" if len(some) == len(prompts) else f"the first {len(some)}"
        notes.append(f"warning: {which} prompts are identical")
    return notes


def _all_lengths(prompts: Prompts) -> str:
    """`describe_lengths` of all prompts; of the first prompts if not all were tokenized."""
    lengths = np.asarray(prompts.unfiltered_lengths)
    if not (lengths == 0).any():
        return describe_lengths(lengths.tolist(), prompts.length_limits)
    first = lengths[: min(FIRST_PROMPTS, int((lengths == 0).argmax()))].tolist()
    return f"{describe_lengths(first, prompts.length_limits)} (the first {len(first)} prompts)"


def data_notes(
    config: RunConfig, prompts: Mapping[str | None, Prompts], context_length: int | None
) -> list[str]:
    """Lines about these splits for the log.

    If data.max_prompt_length is null, they include the limit.
    """
    sources = split_configs(config, training=None in prompts).values()
    is_open = any(source.max_prompt_length is None for source in sources)
    first = [describe_prompt_limit(config.generation, context_length)] if is_open else []
    return first + [note for name in prompts for note in split_notes(name, prompts[name])]


def describe_first_prompt(prompts: Prompts, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The first prompt as the model reads it: its text, with visible line ends, and tokens."""
    ids = prompts.prompt_ids[0]
    text = repr(tokenizer.decode(ids, skip_special_tokens=False))
    if len(text) > 2 * SHOWN_TEXT:
        text = f"{text[:SHOWN_TEXT]} ... {text[-SHOWN_TEXT:]}"
    names = tokenizer.convert_ids_to_tokens(ids)
    pairs = [f"{i} {name!r}" for i, name in zip(ids, names, strict=True)]
    if len(pairs) > 2 * SHOWN_TOKENS:
        pairs = [*pairs[:SHOWN_TOKENS], "...", *pairs[-SHOWN_TOKENS:]]
    kind = "a conversation, by the chat template" if prompts.conversational else "plain text"
    return [f"prompt 0 is {kind}: {text}", f"its {len(ids)} tokens: {', '.join(pairs)}"]


def split_configs(config: RunConfig, training: bool) -> dict[str | None, DataConfig]:
    """The config of every split: held-out sets, and with `training` the training split."""
    sources: dict[str | None, DataConfig] = {}
    if training and config.data.mixture_sources:
        sources.update({f"{MIXTURE_PREFIX}{n}": s for n, s in config.data.mixture_sources.items()})
    elif training:
        sources[None] = config.data
    sources.update(config.held_out)
    return sources


@contextmanager
def errors_naming_split(name: str | None, source: DataConfig) -> Iterator[None]:
    """Let errors inside name the keys of this set, if they are not those of `data`."""
    try:
        yield
    except RunError as error:
        if name is None:
            raise
        raise type(error)(*[_rename_keys(p, name, source) for p in error.problems]) from error


def _rename_keys(problem: Problem, name: str, source: DataConfig) -> Problem:
    def rename_key(text: str) -> str:
        if is_mixture_key(name):
            return DATA_KEY.sub(f"{name}.", text)
        if name:
            return DATA_KEY.sub(f"eval.sets.{name}.", text)
        return re.sub(r"\bdata\.split\b", "data.eval_split", text)

    parts = {part: rename_key(getattr(problem, part)) for part in ("what", "where", "why", "fix")}
    key = f"eval.sets.{name}" if name else "data.eval_split"
    key = name if is_mixture_key(name) else key
    if key not in parts["where"]:
        split = key if name else f"{key}={source.split}"
        parts["where"] = f"{parts['where']} ({split})" if parts["where"] else split
    return replace(problem, **parts)


def _no_headroom(length: int, context_length: int) -> Problem:
    key = "generation.max_completion_length"
    why = f"the completion takes {length} of the model's {context_length} tokens"
    fix = f"{key}={context_length // 2}"
    return Problem("no room for a prompt", key, why, fix)
