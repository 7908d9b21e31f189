"""Checks that the data has the columns that the rewards need, before any model is loaded."""

from collections.abc import Iterable, Mapping, Sequence

from rloo_cli.config.agent import agent_config
from rloo_cli.config.column_names import column_of_field, is_field_of_rows
from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.pasted import rename_column
from rloo_cli.config.schema import RunConfig
from rloo_cli.data import mixture, splits
from rloo_cli.data.dataset import OpenedSplit
from rloo_cli.rewards.engine.arguments import HIDDEN_COLUMNS, REWARD_KWARGS
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.utils.errors import ConfigError, DataError, Problem, refuse


def check_reward_splits(
    config: RunConfig, opened: Mapping[str | None, OpenedSplit], rewards: Sequence[Reward]
) -> None:
    """Check that every split has the columns that rewards need. Raises ConfigError, DataError.

    In a mixture it is enough if one source has a column: in the others' examples it is None. Fields
    that an agent returns with its episodes (agent.fields) count as columns of every split.
    """
    agent = agent_config(config)
    returned = [] if agent is None else agent.reward_columns()
    mixed = splits.mixture_entries(opened)
    if mixed:
        columns = mixture.mixture_columns(mixed, config.data.mixture_sources)
        fields = [f for split in mixed.values() for f in _split_fields(split, rewards)]
        columns += dict.fromkeys(f for f in fields if f not in columns)
        check_reward_columns(rewards, [*_check_returned(returned, columns), *returned])
    for name, source in splits.split_configs(config, None in opened).items():
        if name in opened and not splits.is_mixture_key(name):
            columns = [c for c in opened[name].column_names if c != source.prompts_in]
            columns += _split_fields(opened[name], rewards)
            with splits.errors_naming_split(name, source):
                check_reward_columns(rewards, [*_check_returned(returned, columns), *returned])


def field_names(rewards: Iterable[Reward], rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The required dotted names that are a nested field in one of these rows."""
    names = dict.fromkeys(c for reward in rewards for c in reward.required_columns if "." in c)
    if not names or not len(rows):
        return []
    columns = rows[0]
    return [n for n in names if n not in columns and is_field_of_rows(rows, n)]


def _split_fields(split: OpenedSplit, rewards: Sequence[Reward]) -> list[str]:
    """`field_names` of a split's columns with objects."""
    wanted = [c for reward in rewards for c in reward.required_columns if "." in c]
    roots = dict.fromkeys(column_of_field(split.column_names, c) for c in wanted)
    columns = [column for column in roots if column is not None]
    return field_names(rewards, split.dataset.select_columns(columns)) if columns else []


def _check_returned(returned: Sequence[str], columns: Iterable[str]) -> list[str]:
    """The columns. Raises ConfigError if a name is also one of the agent's fields."""
    names = list(columns)
    for column in sorted({*returned} & {*names}):
        what = f"agent.fields names {column!r}, but the data set has a column with that name"
        why = "a reward can get only one of the two"
        refuse("agent.fields", what, rename_column(column, f"my_{column}"), why)
    return names


def check_reward_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Check that the data set's columns, except the prompt's, fit the rewards.

    Raises ConfigError for a column that has the name of a standard reward argument or of one of
    a reward's `kwargs`, DataError for a missing one.
    """
    names = [c for c in columns if c not in HIDDEN_COLUMNS]
    rewards = list(rewards)
    clashes = [_argument_clash(c) for c in names if c in REWARD_KWARGS]
    for reward in rewards:
        if reward.config.type == "function":
            clashes += [_kwarg_clash(reward, c) for c in names if c in reward.fixed_arguments]
    if clashes:
        raise ConfigError(*clashes)
    missing = [(r, c) for r in rewards for c in r.required_columns if c not in names]
    if missing:
        raise DataError(*[_missing_column(reward, column, names) for reward, column in missing])


def _argument_clash(column: str) -> Problem:
    return Problem(
        f"the data set has a column named {column!r}",
        where="data.columns",
        why=f"rewards already get an argument {column}",
        fix=rename_column(column, f"my_{column}"),
    )


def _kwarg_clash(reward: Reward, column: str) -> Problem:
    return Problem(
        f"{column!r} is a data column and in kwargs",
        where=f"reward.{reward.name}.kwargs.{column}",
        why=f"{reward.location} can get only one of the two",
        fix=f"{rename_column(column, f'my_{column}')}, or remove it from kwargs",
    )


def _missing_column(reward: Reward, column: str, column_names: list[str]) -> Problem:
    near = nearest_names(column, column_names)
    fix = f"data with {column}, or data.columns to rename the column that holds it"
    if near and "." not in column:
        fix = rename_column(near[0], column)
    return Problem(
        f"reward {reward.name!r} needs the data column {column!r}, which is missing",
        where=f"reward.{reward.name} ({reward.location})",
        why=f"columns found: {', '.join(column_names) or 'none but the prompt'}",
        fix=fix,
        more=f"rewards also get: {', '.join(sorted(REWARD_KWARGS))}",
    )
