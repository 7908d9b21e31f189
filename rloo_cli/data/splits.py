"""The data of a run: the split it trains on and the sets held out, opened, checked, tokenised.

Keys of the mappings here: None for the training split, else the name of a held-out set ("" for
the one of data.eval_split); while they are apart, data.mixture.NAME for a source of a mixture. What
is wrong with a set or a source is said of its own keys.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from rloo_cli.config.prompt_limit import describe_prompt_limit, max_prompt_tokens, prompt_headroom
from rloo_cli.config.schema import DataConfig, RunConfig, SetConfig
from rloo_cli.data import dataset, mixture
from rloo_cli.data.dataset import OpenedSplit
from rloo_cli.data.prompts import Prompts, tokenize_prompts
from rloo_cli.utils.errors import ConfigError, Problem, RunError

BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
MAX_BARS = 16  # bars at most


def describe_lengths(lengths: Sequence[int], limits: Sequence[int] = ()) -> str:
    """`prompt tokens: 12 |▁▃▇▅▂| 498, median 214, 95 % up to 430`, of equally wide bars.

    `limits`: the most tokens a prompt may have. Where some have more, it says how many.
    """
    low, high = min(lengths), max(lengths)
    ordered = sorted(lengths)
    told = (
        f"prompt tokens: {low} |{_bars(ordered)}| {high}, median {_length_quantile(ordered, 0.5)}, "
    )
    told += f"95 % up to {_length_quantile(ordered, 0.95)}"
    over = sum(n > min(limits) for n in lengths) if limits else 0
    return told + (f"; {over} over {' or '.join(map(str, limits))}" if over else "")


def _length_quantile(ordered: Sequence[int], share: float) -> int:
    """The least length that at least this share of the prompts does not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _bars(ordered: Sequence[int]) -> str:
    low, span = ordered[0], ordered[-1] - ordered[0] + 1
    width = min(MAX_BARS, span)
    counts = [0] * width
    for n in ordered:
        counts[(n - low) * width // span] += 1
    most = max(counts)
    # A bar that is not empty can be seen.
    return "".join(
        " " if not c else BAR_CHARACTERS[(c * len(BAR_CHARACTERS) - 1) // most] for c in counts
    )


SplitValue = TypeVar("SplitValue")
MIXTURE_PREFIX = "data.mixture."
SHOWN_TEXT, SHOWN_TOKENS = 300, 5  # characters and tokens of each end of a prompt
DATA_KEY = re.compile(rf"\bdata\.(?=(?:{'|'.join(SetConfig.model_fields)})\b)")


def open_splits(config: RunConfig, training: bool = True) -> dict[str | None, OpenedSplit]:
    """Open every split that the run needs. Raises DataError, MachineError."""
    found: dict[str | None, OpenedSplit] = {}
    for name, source in split_configs(config, training).items():
        with errors_naming_split(name, source):
            found[name] = dataset.open_split(source, source.split)
    return found


def tokenize_splits(
    config: RunConfig,
    opened: Mapping[str | None, OpenedSplit],
    tokenizer: Any,
    context_length: int | None,
) -> dict[str | None, Prompts]:
    """Every split's prompts. `context`: the most positions the model has, None = not known.

    Raises ConfigError when completions leave no room, DataError for prompts that do not fit.
    """
    if context_length is not None and context_length <= config.generation.max_completion_length:
        raise ConfigError(_no_headroom(config, context_length))
    keys, room = config.generation, prompt_headroom(config, context_length)
    prompts: dict[str | None, Prompts] = {}
    for name, source in split_configs(config, training=True).items():
        if name not in opened:
            continue
        longest, kwargs = (
            max_prompt_tokens(config, [source], context_length),
            keys.chat_template_kwargs,
        )
        with errors_naming_split(name, source):
            rows = opened[name].dataset
            prompts[name] = tokenize_prompts(
                rows, source, tokenizer, kwargs, longest, config.seed, room
            )
            prompts[name].filtered_out = opened[name].filtered_out
    parts = mixture_entries(prompts)
    if parts:
        whole = mixture.join_prompts(parts, config.data.mixture_weights, config.seed)
        apart = {k: p for k, p in prompts.items() if not is_mixture_key(k)}
        return {None: whole, **apart}
    return prompts


def is_mixture_key(name: str | None) -> bool:
    """Whether this key names a source of data.mixture."""
    return name is not None and name.startswith(MIXTURE_PREFIX)


def mixture_entries(by_key: Mapping[str | None, SplitValue]) -> dict[str, SplitValue]:
    """Of the sources of the mixture alone, by their own names."""
    return {
        k.removeprefix(MIXTURE_PREFIX): v
        for k, v in by_key.items()
        if k and k.startswith(MIXTURE_PREFIX)
    }


def split_notes(name: str | None, prompts: Prompts) -> list[str]:
    """What a reader of the log should know of a split."""
    kind = "conversations" if prompts.conversational else "plain text"
    sizes = (
        f"{kind}, {min(map(len, prompts.prompt_ids))} to {max(map(len, prompts.prompt_ids))} tokens"
    )
    told = f"{len(prompts)} prompts, {sizes}"
    if name is not None:
        said = [f"held out{f', {name}' if name else ''}: {told}"]
    else:
        said = [told]
        said += mixture.mixture_notes(prompts.mixture) if prompts.mixture else []
        said += [describe_lengths(prompts.unfiltered_lengths, prompts.length_limits)]
    where = "" if name is None else f" of {name or 'those held out'}"
    if prompts.filtered_out:
        said.append(f"{prompts.filtered_out} rows{where} were left out (data.filter)")
    for count, what in ((prompts.dropped, "left out"), (prompts.truncated, "cut on the left")):
        if count:
            limit = f"more than {' or '.join(map(str, prompts.length_limits))} tokens"
            said.append(
                f"{count} prompts{where} were too long and {what} (data.overlong): {limit}"
                " (data.max_prompt_length)"
            )
    if name is None and len(prompts) > 100 and len({tuple(i) for i in prompts.prompt_ids}) == 1:
        said.append("warning: all prompts are the same")
    return said


def data_notes(
    config: RunConfig, prompts: Mapping[str | None, Prompts], context_length: int | None
) -> list[str]:
    """What a reader of the log should know of these splits, and of how long a prompt may be where
    data.max_prompt_length leaves it open.
    """
    sources = split_configs(config, training=None in prompts).values()
    is_open = any(source.max_prompt_length is None for source in sources)
    first = [describe_prompt_limit(config, context_length)] if is_open else []
    return first + [note for name in prompts for note in split_notes(name, prompts[name])]


def describe_first_prompt(prompts: Prompts, tokenizer: Any) -> list[str]:
    """The first prompt as the model reads it: its text, marks and ends of lines visible; tokens."""
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
    """The keys of every split: held-out sets, and with `training` what is trained on."""
    sources: dict[str | None, DataConfig] = {}
    if training and config.data.mixture_sources:
        sources.update({f"{MIXTURE_PREFIX}{n}": s for n, s in config.data.mixture_sources.items()})
    elif training:
        sources[None] = config.data
    sources.update(config.held_out)
    return sources


@contextmanager
def errors_naming_split(name: str | None, source: DataConfig) -> Iterator[None]:
    """A refusal inside names the keys of this set, where they are not those of `data`."""
    try:
        yield
    except RunError as error:
        if name is None:
            raise
        raise type(error)(*[_rename_keys(p, name, source) for p in error.problems]) from error


def _rename_keys(problem: Problem, name: str, source: DataConfig) -> Problem:
    def own(text: str) -> str:
        if is_mixture_key(name):
            return DATA_KEY.sub(f"{name}.", text)
        if name:
            return DATA_KEY.sub(f"eval.sets.{name}.", text)
        return re.sub(r"\bdata\.split\b", "data.eval_split", text)

    words = {part: own(getattr(problem, part)) for part in ("what", "where", "why", "fix")}
    mine = f"eval.sets.{name}" if name else "data.eval_split"
    mine = name if is_mixture_key(name) else mine
    if mine not in words["where"]:
        held_out = mine if name else f"{mine}={source.split}"
        words["where"] = f"{words['where']} ({held_out})" if words["where"] else held_out
    return replace(problem, **words)


def _no_headroom(config: RunConfig, context_length: int) -> Problem:
    return Problem(
        "no prompt fits beside the completion",
        "generation.max_completion_length",
        f"{config.generation.max_completion_length} of the model's {context_length} tokens are "
        "for it",
        f"generation.max_completion_length={context_length // 2}",
    )
