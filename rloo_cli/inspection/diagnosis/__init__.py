"""Says from a run's files what went wrong in it: pathologies, advice, and what is damaged.

    evidence     Reads the metrics, the samples and the ledger of a run
    pathologies  Has a rule for each of eighteen things that go wrong

Reads files only, and imports no torch.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from rloo_cli.inspection.diagnosis.evidence import RunEvidence, read_evidence
from rloo_cli.inspection.diagnosis.pathologies import PATHOLOGIES
from rloo_cli.inspection.run_record import RunRecord, inspect_run_folder
from rloo_cli.reporting.advice import Advisor
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class Finding:
    """One pathology that the run's own figures show."""

    name: str  # of docs/doctor.md
    figures: str  # what was seen, with numbers
    fix: str  # the keys to turn

    @property
    def anchor(self) -> str:
        """Where docs/doctor.md has it."""
        return self.name.lower().replace(" ", "-")


@dataclass(frozen=True)
class Diagnosis:
    """All that a run's files say of its health."""

    record: RunRecord
    findings: list[Finding]  # the gravest first
    advice: list[tuple[int, str]]  # step, what the run said then
    problems: list[str]  # files that could not be read

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
    """Apply every rule to a run, whole or damaged. Never raises for what is in its files."""
    return diagnose_evidence(read_evidence(inspect_run_folder(folder)))


def diagnose_evidence(evidence: RunEvidence) -> Diagnosis:
    """Apply every rule to what has been read of a run."""
    findings = [
        Finding(name, figures, fix)
        for name, (rule, fix) in PATHOLOGIES.items()
        if (figures := rule(evidence)) is not None
    ]
    guards = evidence.config_value("guards")
    advisor = Advisor(guards if isinstance(guards, dict) else {})
    advice = [
        (int(metrics["step"]), text)
        for metrics in evidence.record.metrics_lines
        for text in advisor.advise(metrics).values()
    ]
    return Diagnosis(evidence.record, findings, advice, evidence.record.problems)
