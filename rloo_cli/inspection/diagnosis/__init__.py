"""Diagnoses a run from its files: findings, advice, and damaged files.

    evidence  Reads the metrics, the samples and the ledger of a run

The rules are those of reporting/health. Only reads files; imports no torch.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from rloo_cli.inspection.diagnosis.evidence import RunEvidence, read_evidence
from rloo_cli.inspection.run_record import RunRecord, inspect_run_folder
from rloo_cli.reporting.health.advisor import Advisor, advice_text
from rloo_cli.reporting.health.rules import HEALTH_RULES
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class Finding:
    """One fault shown by the run's own figures."""

    name: str  # of docs/inspect.md
    figures: str  # the observation, with numbers
    fix: str  # what to change, with keys

    @property
    def anchor(self) -> str:
        """Its anchor in docs/inspect.md."""
        return self.name.lower().replace(" ", "-")


@dataclass(frozen=True)
class Diagnosis:
    """A run's health, from its files."""

    record: RunRecord
    findings: list[Finding]  # most serious first
    advice: list[tuple[int, str]]  # step, and the run's message
    problems: list[str]  # unreadable files

    def to_json(self) -> JsonObject:
        """Its fields as plain values."""
        return {
            "run": str(self.record.folder),
            "state": self.record.state,
            "step": self.record.last_step,
            "findings": [asdict(finding) for finding in self.findings],
            "advice": [{"step": step, "text": text} for step, text in self.advice],
            "problems": self.problems,
        }


def diagnose_run(folder: Path) -> Diagnosis:
    """Apply every rule to a run, whole or damaged. Never raises for its files' content."""
    return diagnose_evidence(read_evidence(inspect_run_folder(folder)))


def diagnose_evidence(evidence: RunEvidence) -> Diagnosis:
    """Apply every rule to the data read from a run."""
    figures = {
        name: text
        for name, rule in HEALTH_RULES.items()
        if rule.found is not None and evidence.steps >= rule.min_steps
        if (text := rule.found(evidence)) is not None
    }
    silenced = {other for name in figures for other in HEALTH_RULES[name].silences}
    findings = [
        Finding(HEALTH_RULES[name].title, text, HEALTH_RULES[name].fix)
        for name, text in figures.items()
        if name not in silenced
    ]
    guards = evidence.config_value("guards")
    advisor = Advisor(guards if isinstance(guards, dict) else {})
    advice = [
        (int(metrics["step"]), advice_text(*pair))
        for metrics in evidence.record.metrics_lines
        for pair in advisor.advise(metrics).items()
    ]
    return Diagnosis(evidence.record, findings, advice, evidence.record.problems)
