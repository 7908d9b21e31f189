"""Files of a run with any bytes changed: every verb answers, and a run that goes on is right."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_cases import Forked
from fuzz_cases import SOUND_TEXTS, TREES, check_said, count_case, damage, effort, said
from hypothesis import given
from hypothesis import strategies as st
from resume_cases import differing, left, temporaries

from rloo_cli.checkpoint import resume
from rloo_cli.config import check
from rloo_cli.reporting import curves
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

VERBS = {
    "runs": ("runs", "."),
    "top": ("top", "RUN", "--once"),
    "report": ("report", "RUN"),
    "doctor": ("doctor", "RUN"),
    "samples": ("samples", "RUN"),
    "held-out samples": ("samples", "RUN", "--eval", "--worst", "--json"),
    "ledger": ("ledger", "RUN"),
    "first difference": ("compare", "RUN", "twin", "--first-difference"),
    "push": ("push", "RUN", "--dry-run"),
    "reward": ("replay", "RUN", "--step", "2"),
}
TRAIN = (
    "train", "+recipe=smoke", "max_steps=4", "checkpoint.every=1", "logging.samples_every=1",
    "eval.every=2", "eval.max_samples=4", "logging.console=plain", "distributed.threads=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(fast: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has ended, one that is to go on, and what it then is."""
    forked = Forked(fast, tmp_path_factory.mktemp("fuzzed"))
    assert forked(*TRAIN, "name=whole") == 0, forked.said()
    assert forked(*TRAIN, "name=stopped", faults="step@3=term") == 75, forked.said()
    shutil.copytree(forked.folder / "runs/whole", forked.folder / "twin")
    return forked.folder


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Charts are drawn in a second each; what they draw is looked at elsewhere."""
    monkeypatch.setattr(curves, "draw_run_curves", lambda *given: None)
    yield


def files_of(run: Path) -> list[str]:
    """Names of the files of a run, in order."""
    return sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file())


def written(draw: st.DrawFn, path: Path) -> bytes:
    """Other bytes for a file: damaged, or JSON of other kinds in some of its lines."""
    data = path.read_bytes()
    if path.suffix not in (".json", ".jsonl") or draw(st.booleans()):
        return draw(damage(data))
    if path.suffix == ".json":
        values = json.loads(data)
        values[draw(st.sampled_from(sorted(values)))] = draw(TREES)
        return json.dumps(values).encode()
    lines = data.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    values = json.loads(lines[at])
    name = draw(st.one_of(st.sampled_from(sorted(values)), SOUND_TEXTS))
    lines[at] = json.dumps(draw(st.one_of(TREES, st.just(values | {name: draw(TREES)})))).encode()
    return b"\n".join(lines) + b"\n"


@effort(12)
@given(st.data(), st.sampled_from(sorted(VERBS)))
def test_whatever_a_runs_files_hold_every_verb_answers(
    runs: Path, without_pictures: None, data: st.DataObject, verb: str
) -> None:
    run = runs / "runs/damaged"
    shutil.copytree(runs / "runs/whole", run)
    try:
        name = data.draw(st.sampled_from([n for n in files_of(run) if "checkpoint" not in n]))
        changed = data.draw(st.composite(lambda draw: written(draw, run / name))())
        (run / name).write_bytes(changed)
        words = [str(run) if word == "RUN" else word for word in VERBS[verb]]
        check_said(*said(runs, *words), (verb, name, changed[:2000]))
    finally:
        shutil.rmtree(run)


@pytest.mark.parametrize("content", [b"", b"[]"], ids=["empty", "a-list"])
def test_every_verb_answers_where_run_json_is_damaged(
    content: bytes, runs: Path, without_pictures: None
) -> None:
    run = runs / "runs/damaged"
    for verb in sorted(VERBS):
        shutil.copytree(runs / "runs/whole", run)
        (run / "run.json").write_bytes(content)
        words = [str(run) if word == "RUN" else word for word in VERBS[verb]]
        check_said(*said(runs, *words), verb)
        shutil.rmtree(run)


@pytest.mark.parametrize("content", [b"a\xba", b"[" * 500, b"[]"], ids=["bytes", "deep", "list"])
def test_a_runs_config_that_cannot_be_read_is_none_or_one_clear_error(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    assert resume.read_run_config(tmp_path) is None
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        check.read_config(tmp_path / "config.yaml")


@pytest.mark.slow
@effort(6, 0.05)
@given(st.data())
def test_whatever_a_stopped_runs_files_hold_it_ends_as_it_would_have_or_says_why_not(
    runs: Path, fast: dict[str, str], data: st.DataObject
) -> None:
    count_case()
    forked = Forked(fast, runs / "again")
    shutil.rmtree(forked.folder, ignore_errors=True)
    run = forked.folder / "runs/stopped"
    shutil.copytree(runs / "runs/stopped", run)
    kept = {name: (run / name).read_bytes() for name in files_of(run)}
    name = data.draw(st.sampled_from([n for n in kept if not n.startswith(("logs", "samples"))]))
    changed = data.draw(st.composite(lambda draw: written(draw, run / name))())
    (run / name).write_bytes(changed)
    code = forked(*TRAIN, "name=stopped", "resume=auto")
    got = forked.said()
    what = (name, changed[:2000], got)
    assert "Traceback" not in got and code in (0, 2, 3, 4, 6, 7, 8), what
    if code:
        assert "error: " in got, what
        lost = [n for n in kept if "checkpoint" in n and not (run / n).exists()]
        assert not lost, what
    elif name not in ("metrics.jsonl", "ledger.jsonl"):
        assert not (found := differing(left(run), left(runs / "runs/whole"))), (found, what)
        assert not temporaries(run), what
