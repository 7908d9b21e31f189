"""Whether the data has the columns that the rewards need, before any model is loaded."""

from collections.abc import Iterable, Mapping, Sequence

from rloo_cli.config.schema import RunConfig
from rloo_cli.data import mixture, splits
from rloo_cli.data.dataset import Opened
from rloo_cli.rewards.engine.arguments import KWARGS, NOT_PASSED
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.utils.errors import ConfigError, DataError, Problem


def check_splits(
    config: RunConfig, found: Mapping[str | None, Opened], rewards: Sequence[Reward]
) -> None:
    """Whether every split has the columns the rewards need. Raises ConfigError, DataError.

    Of a mixture one source that has a column is enough: in the others' rows it is None.
    """
    mixed = splits.of_mixture(found)
    if mixed:
        check_columns(rewards, mixture.columns(mixed, config.data.sources))
    for name, source in splits.sources_of(config, None in found).items():
        if name in found and not splits.in_mixture(name):
            columns = [c for c in found[name].column_names if c != source.prompt_column]
            with splits.said_of(name, source):
                check_columns(rewards, columns)


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Whether the data set fits the rewards, before any model is loaded.

    `columns`: the data set's, the prompt's left out. Raises ConfigError for a column that is
    named like an argument of ours or like one of `kwargs`, DataError for one that is missing.
    """
    found = [c for c in columns if c not in NOT_PASSED]
    rewards = list(rewards)
    clashes = [_clash(c) for c in found if c in KWARGS]
    for reward in rewards:
        if reward.config.type == "function":
            clashes += [_twice(reward, c) for c in found if c in reward.fixed]
    if clashes:
        raise ConfigError(*clashes)
    missing = [_missing(r, n, found) for r in rewards for n in r.needs if n not in found]
    if missing:
        raise DataError(*missing)


def _clash(column: str) -> Problem:
    return Problem(
        f"the data set has a column named {column!r}",
        where="data.columns",
        why=f"rewards are called with {column} of ours; they could not tell the two apart",
        fix=f"data.columns={{{column}: my_{column}}}",
    )


def _twice(reward: Reward, column: str) -> Problem:
    return Problem(
        f"{column!r} is a data column and in kwargs",
        where=f"reward.{reward.name}.kwargs.{column}",
        why=f"{reward.location} can be given only one of the two",
        fix=f"data.columns={{{column}: my_{column}}}, or take it out of kwargs",
    )


def _missing(reward: Reward, column: str, found: list[str]) -> Problem:
    return Problem(
        f"reward {reward.name!r} needs the data column {column!r}, which is not there",
        where=f"reward.{reward.name} ({reward.location})",
        why=f"columns found: {', '.join(found) or 'none but the prompt'}",
        fix=f"rename one with data.columns={{old: {column}}}",
        more=f"rewards also get: {', '.join(sorted(KWARGS))}",
    )
