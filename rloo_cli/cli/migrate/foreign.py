"""Refuses trainers whose runs are recognised and not converted, each by its name.

They count batches, KL and clipping differently; a recipe with half of their settings would be
another experiment. The error says which algorithm computes the same here, and which settings mean
the same under another name.
"""

import re

from rloo_cli.cli.migrate import tables
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject


def refuse_foreign_trainer(args: list[str], flags: JsonObject, from_option: str = "") -> None:
    """Raise ConfigError for OpenRLHF, verl or Megatron. `from_option`: the value of --from."""
    text = " ".join(args)
    dotted = dict(re.findall(r"(?:^|\s)\+*([a-z_]+(?:\.[a-z_]+)+)=(\S+)", text)) | {
        name: value for name, value in flags.items() if "." in name
    }
    for tool, pattern in tables.FOREIGN_PATTERNS.items():
        names = tables.FOREIGN_FLAGS[tool] & set(flags)
        keys = {"actor_rollout_ref", "algorithm.adv_estimator"} & set(flags)
        by_flags = len(names) > 1 or (tool == "verl" and keys)
        if tool == from_option or by_flags or re.search(pattern, text):
            raise _foreign_trainer_error(tool, _named_settings(text, flags) | dotted)


def _named_settings(text: str, flags: JsonObject) -> JsonObject:
    """The flags with their values, which are read from the text of the command if not yet known."""
    from_text = dict(re.findall(r"--([\w-]+)[= ]+([^\s-]\S*|-\d\S*)", text))
    values = {k: v for k, v in flags.items() if v not in (None, [])}
    return {k.replace("-", "_"): v for k, v in (from_text | values).items()}


def _foreign_trainer_error(tool: str, settings: JsonObject) -> ConfigError:
    title = tables.FOREIGN_TITLES[tool]
    values = {k: v[0] if isinstance(v, list) and v else v for k, v in settings.items()}
    estimators = tables.FOREIGN_ESTIMATORS[tool]
    names = ("advantage_estimator", "algorithm.adv_estimator")
    estimator = next((values[n] for n in names if n in values), None)
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
