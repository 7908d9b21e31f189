"""Writes one HTML page about a run: its verdict, curves, samples, seconds, memory and ledger.

    charts        Draws the charts as Vega-Lite
    sections      Builds the page's text and tables
    token_strips  Shows completions token by token, with numbers as colours

The page is self-contained, including the script of its charts: it sends no request, and the same
run folder gives the same bytes anywhere. Every text is escaped; should one get past that, the
page's policy lets a browser run only its two scripts and send no requests.
"""

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.inspection.diagnosis import diagnose_evidence
from rloo_cli.inspection.diagnosis.evidence import RunEvidence, read_evidence
from rloo_cli.inspection.report import charts, sections
from rloo_cli.inspection.run_record import inspect_run_folder
from rloo_cli.utils.errors import refuse, require_packages
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATE = Path(__file__).with_name("page.html.j2")
DRAW_SCRIPT = Path(__file__).with_name("draw_charts.js")


def make_report(folder: Path) -> tuple[str, JsonObject]:
    """The page of a run, and its figures as plain values.

    Raises ConfigError for a folder without a run, MachineError without the extra
    `view`.
    """
    require_packages("view", "rloo report", "altair", "jinja2", "vl_convert")
    run = read_evidence(inspect_run_folder(folder))
    if not run.record.config and not run.record.run_metadata and not run.steps:
        why = "config.yaml, run.json and metrics.jsonl are missing or unreadable"
        what, fix = f"{folder} is not a run's folder", "name a run that `rloo runs` lists"
        refuse("command line", what, fix, why)
    diagnosis = diagnose_evidence(run)
    built = sections.build_sections(run, diagnosis)
    groups = _drawn_charts(run, diagnosis.advice)
    specs = {
        f"chart-{name}-{number}": chart.spec
        for name, found in groups.items()
        for number, chart in enumerate(found)
    }
    template = _environment().from_string(TEMPLATE.read_text(encoding="utf-8"))
    scripts = [_chart_script(), DRAW_SCRIPT.read_text(encoding="utf-8")] if specs else ["", ""]
    page = template.render(
        s=built,
        charts=groups,
        findings=diagnosis.findings,
        advice=diagnosis.advice,
        problems=[text.replace(f"{folder}/", "") for text in diagnosis.problems],
        specs=_script_json(specs),
        script=scripts[0],
        draw=scripts[1],
        policy=_page_policy(scripts if specs else []),
    )
    figures = sections.sections_json(built) | {
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "charts": [chart.title for found in groups.values() for chart in found],
    }
    return page, figures


def _drawn_charts(
    run: RunEvidence, advice: Sequence[tuple[int, str]]
) -> dict[str, list[charts.ReportChart]]:
    """The charts of each part of the page."""
    from altair.utils.schemapi import debug_mode  # lazy: a third of a second, only for this verb

    with debug_mode(False):  # its checks of every value take as long as everything else
        phases = charts.phase_chart(run)
        curves, scores = charts.curve_charts(run, advice), charts.score_charts(run)
    return {"curves": curves, "scores": scores, "phases": [phases] if phases else []}


def _environment() -> "Environment":
    from jinja2 import Environment, StrictUndefined  # lazy: only for this verb

    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _page_policy(scripts: Sequence[str]) -> str:
    """The page's content policy: these scripts, by their digests, and its own styles.

    Vega compiles the expressions of our charts, so it may evaluate code.
    """
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    named = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    runs = " ".join(["'unsafe-eval'", *named]) if named else "'none'"
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {runs}; {rest}"


def _script_json(values: JsonObject) -> str:
    """JSON that is safe inside a script element: nothing in it ends the element."""
    text = json.dumps(values, separators=(",", ":"), sort_keys=True, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _chart_script() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, as vl-convert bundles them."""
    import vl_convert  # lazy: a second, only for this verb

    # Its types require a snippet; without one it bundles only the three libraries.
    bundle: str = vl_convert.javascript_bundle(None)  # type: ignore[arg-type]
    return bundle.replace("</script", "<\\/script")
