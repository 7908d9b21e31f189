"""Seals a finished run into one folder that others can check (`rloo record`).

The manifest, with the hash of every file and one over all, shows accidental or careless change. It
is not a proof: who changes a file can also seal it again. The proof is the recomputed score
(`record_score`) and a second run.
"""

from pathlib import Path

from rloo_cli import __version__
from rloo_cli.checkpoint import manifest
from rloo_cli.config import check
from rloo_cli.config.agent import agent_config
from rloo_cli.inspection.resume_proof import hash_weights
from rloo_cli.inspection.run_record import RunRecord, read_run_record
from rloo_cli.inspection.sample_files import SAMPLES_FILE
from rloo_cli.reporting import eval_lines
from rloo_cli.utils import paths
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject, read_json, write_json, write_whole_file

RECORD_FILE = "record.json"
COPIED_FILES = ("config.yaml", "overrides.txt", "env.json", "summary.json", "metrics.jsonl")
SCORE_PARTS = {"value": "", "se": "/se", "low": "/low", "high": "/high"}


def seal_run(folder: Path, out: Path) -> JsonObject:
    """Write the record of the run in `folder` into the empty folder `out`. -> its record.json

    Raises ConfigError for a run of which a record could not be checked.
    """
    run, settings = read_run_record(folder), check.read_config(folder / "config.yaml")
    first = next(iter(settings.held_out), "")
    metric = settings.target.metric or eval_lines.eval_prefix(first) + "reward"
    try:
        facts = _record_facts(run, metric, agent_config(settings) is not None)
    except (KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        refuse("command line", f"{folder} is damaged", f"rloo doctor {folder}", why)
    samples = [p for p in folder.glob("samples/*") if SAMPLES_FILE.fullmatch(p.name)]
    for path in [*samples, *(p for p in map(folder.joinpath, COPIED_FILES) if p.is_file())]:
        write_whole_file(out / path.relative_to(folder), path.read_bytes())
    recipe = paths.recipe_files().get(str(facts["recipe"]), Path(str(facts["recipe"])))
    if recipe.is_file():
        write_whole_file(out / "recipe.yaml", recipe.read_bytes())
    write_json(out / RECORD_FILE, facts)
    manifest.write_manifest(out, {"rloo": __version__})
    return facts


def read_sealed_facts(folder: Path) -> JsonObject:
    """The content of a record's record.json.

    Raises ConfigError if the folder is not a record, DataError if it cannot be read.
    """
    if not (folder / RECORD_FILE).is_file() and not (folder / manifest.MANIFEST_FILE).is_file():
        why = f"found neither {RECORD_FILE} nor {manifest.MANIFEST_FILE} there"
        fix = "rloo record RUN --out FOLDER, then rloo record verify FOLDER"
        refuse("command line", f"{folder} is not a record", fix, why)
    return read_json(folder / RECORD_FILE)


def score_of_line(line: JsonObject, metric: str) -> JsonObject:
    """A score of an evaluation's line with its interval, as far as known."""
    parts = {part: line.get(metric + suffix) for part, suffix in SCORE_PARTS.items()}
    return {"metric": metric, **{p: v for p, v in parts.items() if v is not None}}


def _record_facts(run: RunRecord, metric: str, has_episodes: bool) -> JsonObject:
    about, summary = run.run_metadata, read_json(run.folder / "summary.json")
    line = dict(run.eval_metrics[-1]) if run.eval_metrics else {}
    _check_recordable(run, line, metric, has_episodes)
    return {
        "run": about["name"],
        "recipe": about.get("recipe"),
        "seed": run.seed,
        "rloo": __version__,
        "score": {**score_of_line(line, metric), "step": line["step"]},
        "target": summary.get("target"),
        "steps": summary["steps"],
        "max_steps": about["plan"]["max_steps"],
        "prompts": about["prompts"],
        "progress": about["progress"],
        "data": about.get("fingerprint"),
        "code_files": about.get("code_files"),
        "weights": hash_weights(run.folder / "final"),
    }


def _check_recordable(run: RunRecord, line: JsonObject, metric: str, has_episodes: bool) -> None:
    """Raises ConfigError for a run of which a record could not be checked."""
    what, why, fix = f"{run.folder} cannot be recorded", "", ""
    checkpoint = run.run_metadata.get("came_from")  # a resumed run's is in its own folder
    if not run.finished:
        why, fix = f"it is {run.status_text}", "finish it first, with resume=auto"
    elif checkpoint and Path(checkpoint).resolve().parent != run.folder.resolve():
        why = f"it began at a checkpoint of another run, {checkpoint}"
        fix = "record a run that began at its first step"
    elif metric not in line:
        why = f"its last evaluation has no {metric}"
        fix = "a run with a held-out set, such as data.eval_split=test"
    elif has_episodes:
        why = "it has episodes (agent), which samples do not hold completely"
        fix = "rloo replay RUN --step N checks recorded episodes"
    if why:
        refuse("command line", what, fix, why)
