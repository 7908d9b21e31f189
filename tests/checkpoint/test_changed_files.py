"""A file of the user's that changed between a stop and `resume=auto` is named and refused."""

import json
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Ended
from fork_cases import Forked
from loop_cases import checked
from resume_cases import STOP, WORDS

from rloo_cli.checkpoint import restore
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config.user_code import code_files, code_fingerprints
from rloo_cli.inspection.first_difference import find_first_difference
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import read_json

CODE = """
def score(completions, **kwargs):
    return [float(len(text)) for text in completions]
def change(row): return row
def passes(row): return True
def adam(parameters, **kwargs):
    import torch
    return torch.optim.Adam(parameters)
def flat(optimizer, num_warmup_steps, num_training_steps):
    import torch
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
class Listener: pass
"""
# key -> the word that names a file, and the file
FILES = {
    "reward.function.path": ("reward=function reward.function.path={}:score", "mine.py"),
    "data.map": ("data.map={}:change", "mine.py"),
    "data.filter": ("data.filter={}:passes", "mine.py"),
    "train.optimizer": ("train.optimizer={}:adam", "mine.py"),
    "train.lr_scheduler": ("train.lr_scheduler={}:flat", "mine.py"),
    "logging.events": ("logging.events=[{}:Listener]", "mine.py"),
    "model.chat_template": ("model.chat_template={}", "mine.jinja"),
    "agent.tools": ("agent=tools agent.tools=[{}:change]", "mine.py"),
}


@pytest.mark.parametrize("key", FILES)
def test_every_file_that_a_run_trains_with_is_in_its_fingerprints(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, name = FILES[key]
    path = tmp_path / name
    path.write_text(CODE if name.endswith(".py") else "{{ messages }}")
    run = checked((), tuple(text.format(path).split()))
    (found,) = [k for k in code_files(run) if k.startswith(key)]
    before = code_fingerprints(code_files(run))
    state = {"code_files": before}
    monkeypatch.setattr(restore.manifest, "read_trainer_state", lambda _: state)
    plan = ResumePlan(tmp_path, 2, tmp_path)
    assert restore.check_same_code(plan, run) == []
    path.write_text(path.read_text() + "\n# other")
    with pytest.raises(ConfigError) as refused:
        restore.check_same_code(plan, run)
    problem = assert_refused(refused, key=str(path), fix="resume_allow_changes=true")
    assert found in problem.render() and before[found] in problem.why
    allowed = run.model_copy(update={"resume_allow_changes": True})
    (note,) = restore.check_same_code(plan, allowed)
    assert found in note


def test_an_algorithm_of_ones_own_is_in_the_fingerprints(tmp_path: Path) -> None:
    run = checked((), ())
    algorithm = run.algorithm.model_copy(update={"name": str(tmp_path / "mine.py")})
    (tmp_path / "mine.py").write_text("x = 1")
    mine = run.model_copy(update={"algorithm": algorithm})
    assert code_fingerprints(code_files(mine))["algorithm.name"] != "-"
    assert code_fingerprints(code_files(run)) == {}


def test_a_changed_reward_is_refused_on_resume_and_named_by_compare(forked: Forked) -> None:
    path = forked.folder / "mine.py"
    path.write_text(CODE)
    words = (*WORDS, "reward=function", f"reward.function.path={path}:score")
    assert forked(*words, faults=STOP) == 75, forked.said()
    folder = forked.folder / "runs" / "smoke"
    first = read_json(folder / "run.json")["code_files"]
    path.write_text(CODE.replace("float(len(text))", "-float(len(text))"))
    assert forked(*words, "resume=auto") == 2
    assert_refused(Ended(2, "", forked.said()), key=str(path), fix="resume_allow_changes=true")
    assert forked(*words, "resume=auto", "resume_allow_changes=true") == 0, forked.said()
    assert "the checkpoint: reward.function.path" in forked.said()
    assert read_json(folder / "run.json")["code_files"] != first
    other = forked.folder / "other"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"code_files": first}))
    causes = find_first_difference(folder, other).causes
    assert any(cause.what == "reward.function.path (file)" for cause in causes)
