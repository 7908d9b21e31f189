"""Trainers whose runs are recognised and not converted: each is refused by its name.

Their batch, their KL and their clipping are counted otherwise; a recipe made of half of them would
be another experiment. What can be said plainly is said: which algorithm computes the same here, and
the settings that mean the same under another name.
"""

import re

from rloo_cli.cli.migrate import tables
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject


def refuse_foreign_trainer(args: list[str], flags: JsonObject, from_option: str = "") -> None:
    """Raises ConfigError where this is OpenRLHF, verl or Megatron. `named`: by --from."""
    text = " ".join(args)
    dotted = dict(re.findall(r"(?:^|\s)\+*([a-z_]+(?:\.[a-z_]+)+)=(\S+)", text)) | {
        name: value for name, value in flags.items() if "." in name
    }
    for tool, pattern in tables.FOREIGN_PATTERNS.items():
        names = tables.FOREIGN_FLAGS[tool] & set(flags)
        keys = {"actor_rollout_ref", "algorithm.adv_estimator"} & set(flags)
        if (
            tool == from_option
            or re.search(pattern, text)
            or len(names) > 1
            or (tool == "verl" and keys)
        ):
            raise _foreign_trainer_error(tool, _named_settings(text, flags) | dotted)


def _named_settings(text: str, flags: JsonObject) -> JsonObject:
    """The flags with their values, from the words where the flags have none yet."""
    given = dict(re.findall(r"--([\w-]+)[= ]+([^\s-]\S*|-\d\S*)", text))
    known = {k: v for k, v in flags.items() if v not in (None, [])}
    return {k.replace("-", "_"): v for k, v in (given | known).items()}


def _foreign_trainer_error(tool: str, settings: JsonObject) -> ConfigError:
    title = tables.FOREIGN_TITLES[tool]
    plain = {k: v[0] if isinstance(v, list) and v else v for k, v in settings.items()}
    estimators = tables.FOREIGN_ESTIMATORS[tool]
    asked = next((plain[n] for n in ("advantage_estimator", "algorithm.adv_estimator")
                  if n in plain), None)  # fmt: skip
    algorithm = estimators.get(str(asked)) or estimators["rloo"]
    same = [
        f"{ours}={plain[theirs]}"
        for theirs, ours in tables.FOREIGN_EQUIVALENTS[tool].items()
        if isinstance(plain.get(theirs), str | int | float) and "$" not in str(plain[theirs])
    ]
    why = f"{title} counts batches, KL and clipping otherwise: half a recipe would be another run"
    fix = "; what means the same: ".join(
        [f"rloo train {algorithm}", *[" ".join(same)] * bool(same)]
    )
    what = f"this is a run of {title}, which rloo migrate does not convert"
    return ConfigError(Problem(what, "the old run", why, fix, more="docs/OBJECTIVES.md"))
