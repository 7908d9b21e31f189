"""Refuses a trainer whose runs are recognised and not converted: ms-swift's Megatron.

It counts batches and devices differently; a recipe with half of its settings would be another
experiment. The error says which algorithm computes the same here, and which settings mean the same
under another name. OpenRLHF and verl are converted (openrlhf.py, verl.py).
"""

import re

from rloo_cli.compat.migrate import tables
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject


def refuse_foreign_trainer(args: list[str], flags: JsonObject) -> None:
    """Raise ConfigError for a command or settings of ms-swift's Megatron."""
    text = " ".join(args)
    for tool in tables.FOREIGN_EQUIVALENTS:
        names = tables.FOREIGN_FLAGS[tool] & set(flags)
        if len(names) > 1 or re.search(tables.FOREIGN_PATTERNS[tool], text):
            raise _foreign_trainer_error(tool, _named_settings(text, flags))


def _named_settings(text: str, flags: JsonObject) -> JsonObject:
    """The flags with their values, which are read from the text of the command if not yet known."""
    from_text = dict(re.findall(r"--([\w-]+)[= ]+([^\s-]\S*|-\d\S*)", text))
    values = {k: v for k, v in flags.items() if v not in (None, [])}
    return {k.replace("-", "_"): v for k, v in (from_text | values).items()}


def _foreign_trainer_error(tool: str, settings: JsonObject) -> ConfigError:
    title = tables.FOREIGN_TITLES[tool]
    values = {k: v[0] if isinstance(v, list) and v else v for k, v in settings.items()}
    estimators = tables.FOREIGN_ESTIMATORS[tool]
    estimator = values.get("advantage_estimator")
    same = [
        f"{ours}={values[theirs]}"
        for theirs, ours in tables.FOREIGN_EQUIVALENTS[tool].items()
        if isinstance(values.get(theirs), str | int | float) and "$" not in str(values[theirs])
    ]
    why = f"{title} counts batches, KL and clipping otherwise: half a recipe would be another run"
    fix = f"rloo train {estimators.get(str(estimator)) or estimators['rloo']}"
    fix += f"; what means the same: {' '.join(same)}" if same else ""
    what = f"this is a run of {title}, which rloo migrate does not convert"
    return ConfigError(Problem(what, "the old run", why, fix, more="docs/OBJECTIVES.md"))
