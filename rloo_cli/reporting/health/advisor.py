"""Applies the health rules during a run: advice, or the error of a guard."""

from collections.abc import Mapping

from rloo_cli.reporting.eval_lines import is_evaluation
from rloo_cli.reporting.health.evidence import Evidence
from rloo_cli.reporting.health.reward_rules import HELD_OUT_METRICS
from rloo_cli.reporting.health.rules import HEALTH_RULES
from rloo_cli.reporting.metrics_lines import MetricsMapping
from rloo_cli.utils.errors import Problem

CHECKS = {name: rule.check for name, rule in HEALTH_RULES.items() if rule.check is not None}


class Advisor:
    """Reads each logged step and returns what is newly wrong; a rule fires once per run.

    `guards`: the config's setting of each rule: warn (once; the default), off, or fail. The last
    stops the run. After a resume, that rule judges only later steps:
    its history restarts where it fired, here and where old lines are read again.
    """

    def __init__(self, guards: Mapping[str, object] | None = None) -> None:
        given = guards or {}
        self.levels = {name: given.get(name, "warn") for name in CHECKS}
        self.open_rules = [name for name, level in self.levels.items() if level != "off"]
        self.histories = {name: Evidence() for name in self.open_rules}

    def advise(self, metrics: MetricsMapping) -> dict[str, str]:
        """New problems at a line of metrics: the name of each rule that fires -> its message.

        Evaluation lines go to the rules that use them, step lines to all others.
        """
        found: dict[str, str] = {}
        held_out = is_evaluation(metrics)
        for name in self.open_rules:
            rule = HEALTH_RULES[name]
            if held_out != (rule.metrics == HELD_OUT_METRICS):
                continue
            self.histories[name].add_line(metrics, rule.metrics)
            if text := CHECKS[name](self.histories[name]):
                found[name] = text
        spoken: set[str] = set()
        for name in found:
            if self.levels[name] == "fail":
                self.histories[name] = Evidence()
            else:
                spoken.add(name)
            for other in HEALTH_RULES[name].silences:
                if self.levels.get(other) == "warn":
                    spoken.add(other)
        self.open_rules = [name for name in self.open_rules if name not in spoken]
        return found


def advice_text(name: str, figures: str) -> str:
    """A rule's finding, and what to change."""
    return f"{figures}. {HEALTH_RULES[name].fix}."


def guard_problem(name: str, step: int, figures: str) -> Problem:
    """The error of a run that the guard `name` (`guards.NAME=fail`) stops after `step`."""
    rule = HEALTH_RULES[name]
    what = f"the guard {name} stopped the run after step {step}"
    where = f"guards.{name}=fail, metric {', '.join(rule.metrics)}"
    fix = f"{rule.fix}. Or guards.{name}=warn; resume=auto continues from this step"
    return Problem(what, where, figures, fix, "rloo docs inspect#guards")
