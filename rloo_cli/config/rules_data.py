"""What the keys of `data` forbid each other: path and mixture, streaming, filters.

No data is opened here, and no code of the user's is run.
"""

from collections.abc import Iterator

from rloo_cli.config import template, synthetic
from rloo_cli.utils.errors import Problem
from rloo_cli.config.schema import DataConfig, RunConfig


def problems(run: RunConfig) -> Iterator[Problem]:
    """Everything wrong with where a run's rows come from."""
    data, named = run.data, list(run.data.sources)
    if (data.path is None) != bool(named):
        found = f"data.path={data.path or 'null'}, data.mixture={', '.join(named) or 'null'}"
        yield Problem(
            "rows come either from data.path or from the sources of data.mixture",
            "data.mixture" if named else "data.path",
            f"found {found}",
            "data.path=null" if named else "data.path=PATH",
        )
    elif named and data.eval_split is not None and not run.held_out.keys() - {""}:
        yield Problem(
            "data.eval_split is a split of data.path, and a mixture has none",
            "data.eval_split",
            f"sources: {', '.join(named)}",
            "data.eval_split=null, and eval.sets.NAME={path: ..., split: ...} for what is held out",
        )
    for key, source in read(run).items():
        yield from _streaming(key, source)
        yield from _template(key, source)


def _streaming(key: str, source: DataConfig) -> Iterator[Problem]:
    if not source.streaming:
        return
    if source.max_samples is None:
        yield Problem(
            f"{key}.streaming needs {key}.max_samples",
            f"{key}.max_samples",
            "rows are read one by one up to that number; without it all of them would be",
            f"{key}.max_samples=10000, or {key}.streaming=false",
        )
    elif (source.path or "").startswith(synthetic.MADE):
        why = f"{source.path} is made here: there is nothing to read row by row"
        yield Problem(f"{key}.streaming is set", f"{key}.streaming", why, f"{key}.streaming=false")


def _template(key: str, source: DataConfig) -> Iterator[Problem]:
    try:
        list(template.split_template(source.template or ""))
    except ValueError as error:
        fix = "{column} for a column, {{ and }} for braces"
        yield Problem(f"{key}.template cannot be read", f"{key}.template", str(error), fix)


def user_code(run: RunConfig) -> dict[str, str]:
    """Key -> file.py:name of every filter and map that is the user's code, the same one once."""
    given = {f"{key}.{k}": getattr(s, k) for key, s in read(run).items() for k in ("filter", "map")}
    found = {key: spec for key, spec in given.items() if isinstance(spec, str)}
    return {key: spec for n, (key, spec) in enumerate(found.items())
            if spec not in [*found.values()][:n]}  # fmt: skip


def read(run: RunConfig) -> dict[str, DataConfig]:
    """Key -> data of every split that a run reads, "data" or "data.mixture.NAME" first."""
    sources = {f"data.mixture.{name}": source for name, source in run.data.sources.items()}
    sets = {f"eval.sets.{name}": data for name, data in run.held_out.items() if name}
    return (sources or {"data": run.data}) | sets
