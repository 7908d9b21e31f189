"""What a run may go on from, and with what: everything else is refused before torch is loaded."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from assert_refused import assert_refused
from cli_cases import Ended, Rloo
from fork_cases import Forked
from resume_cases import STOP, WORDS, state
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_cli import __version__
from rloo_cli.checkpoint import manifest, resume
from rloo_cli.cli.eval_target import eval_target_of_run
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import read_json

# A checkpoint is a model.


def test_a_checkpoint_is_a_model_folder_with_the_logits_of_the_run(copy: Path) -> None:
    checkpoint = copy / "checkpoint-2"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("Name 5 things", return_tensors="pt")
    weights = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in weights.items())
    logits = model(**ids).logits
    assert torch.isfinite(logits).all()
    values = json.loads((checkpoint / manifest.MANIFEST_FILE).read_text())
    assert (values["step"], values["updates"], values["prompts_consumed"]) == (2, 2, 8)
    assert values["world_size"] == 1 and values["fingerprint"] and values["versions"]["torch"]
    files = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()}
    assert files - {manifest.MANIFEST_FILE} == set(values["files"])
    assert not [f for f in files if f.endswith((".bin", ".pt", ".pkl", ".pth"))]
    assert (copy / "latest").read_text() == "checkpoint-2\n"


# A damaged one is passed over, with the reason.


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "a flipped byte of the weights": (
        lambda c: flip(c / "model.safetensors"),
        "model.safetensors has changed since it was saved",
    ),
    "a flipped byte of the optimizer": (
        lambda c: flip(c / "trainer" / "optimizer-1-of-1.safetensors"),
        "its hash differs",
    ),
    "a truncated file": (
        lambda c: (c / "model.safetensors").write_bytes(b"12345"),
        "has 5 bytes instead",
    ),
    "a missing file": (lambda c: (c / "config.json").unlink(), "config.json is missing"),
    "a file more": (lambda c: (c / "more.py").write_text(""), "more.py is not listed"),
    "no manifest": (lambda c: (c / manifest.MANIFEST_FILE).unlink(), "was interrupted"),
    "half a manifest": (
        lambda c: (c / manifest.MANIFEST_FILE).write_text('{"format": 1, "fi'),
        "cannot be read",
    ),
    "a changed manifest": (
        lambda c: (c / manifest.MANIFEST_FILE).write_text(
            (c / manifest.MANIFEST_FILE).read_text().replace('"step": 2', '"step": 9')
        ),
        "was changed",
    ),
    "a newer format": (
        lambda c: (c / manifest.MANIFEST_FILE).write_text(
            (c / manifest.MANIFEST_FILE).read_text().replace('"format": 1', '"format": 2')
        ),
        "newer than 1",
    ),
    "a manifest of nothing": (
        lambda c: (c / manifest.MANIFEST_FILE).write_text("[" * 100000),
        "be read",
    ),
    "an empty folder": (
        lambda c: [shutil.rmtree(c), c.mkdir()],
        "was interrupted",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(damage: str, copy: Path) -> None:
    spoil, why = DAMAGES[damage]
    spoil(copy / "checkpoint-2")
    found, passed = manifest.newest_checkpoint(copy)
    assert found == copy / "checkpoint-1"
    assert len(passed) == 1 and "checkpoint-2 is skipped" in passed[0] and why in passed[0]


def test_a_run_goes_on_from_the_one_before_and_keeps_the_damaged_one(
    copy: Path, forked: Forked
) -> None:
    flip(copy / "checkpoint-2" / "model.safetensors")
    assert forked(*WORDS, "resume=auto") == 0
    said = forked.said()
    for names in (("checkpoint-2 ", "model.safetensors"), ("smoke/checkpoint-1,", "1 of 3")):
        assert any(all(name in line for name in names) for line in said.splitlines()), names
    assert manifest.checkpoint_problem(copy / "checkpoint-2") is None
    assert (copy / "checkpoint-2.attempt1").is_dir()


# A path that cannot be used is an error, each its own, and nothing is touched.


def other_model(folder: Path) -> Path:
    """A model of another size than the run's."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4096, "vocab_size": 258}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.slow_but("words0-resume=nothing does not exist")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resume=nothing"], "resume=nothing does not exist"),
        (["resume=runs/smoke/samples"], "resume=runs/smoke/samples is not a checkpoint"),
        (["resume=runs/smoke"], "resume=runs/smoke/checkpoint-2"),  # what was meant
        (["resume=runs/newer"], "newer than 1"),
        (["resume=runs/smoke/checkpoint-2", "model.path=./large"], "fix      model.path=make:"),
    ],
)
def test_a_path_that_cannot_be_used_is_an_error_of_its_own(
    words: list[str], said: str, copy: Path, rloo_without_torch: Rloo
) -> None:
    other_model(rloo_without_torch.folder / "large")
    newer = copy.with_name("newer")
    shutil.copytree(copy / "checkpoint-2", newer)
    text = (newer / manifest.MANIFEST_FILE).read_text()
    (newer / manifest.MANIFEST_FILE).write_text(text.replace('"format": 1', '"format": 2'))
    before = state(rloo_without_torch.folder)
    ended = rloo_without_torch(*WORDS, *words)
    assert ended.code == 2 and said in ended.err, ended.said
    assert "Traceback" not in ended.said and state(rloo_without_torch.folder) == before


# A config that is another's.

REFUSED = {
    "nothing said": ([], "runs/smoke is a run of this config", "fix      resume=auto"),
    "the config differs": (["algorithm.beta=0.2"], "algorithm.beta: 0.05 -> 0.2", "name=OTHER"),
    "beta": (["algorithm.beta=0.2", "resume=auto"], "algorithm.beta: 0.05 -> 0.2", "allow"),
    "batch": (["train.prompts_per_step=8", "resume=auto"], "train.prompts_per_step", "allow"),
    "data": (["data.max_samples=20", "resume=auto"], "data.max_samples: None -> 20", "allow"),
    "seed": (["seed=2", "resume=auto"], "seed: 1 -> 2", "allow"),
    "reward": (["reward.length_tokens.weight=1", "resume=auto"], "0.01 -> 1.0", "allow"),
    "length": (
        ["train.lr_scheduler=linear", "max_steps=9", "resume=auto"], "max_steps: 3 -> 9", "length",
    ),
}  # fmt: skip


@pytest.mark.slow_but("the config differs", "data")
@pytest.mark.parametrize("case", REFUSED)
def test_a_change_that_makes_it_another_experiment_is_refused(
    case: str, copy: Path, rloo_without_torch: Rloo
) -> None:
    words, *said = REFUSED[case]
    before = state(rloo_without_torch.folder)
    ended = rloo_without_torch(*WORDS, *words)
    assert ended.code == 2, ended.said
    for part in said:
        assert part in ended.err
    assert state(rloo_without_torch.folder) == before


@pytest.mark.parametrize("way", ["auto", "runs/smoke/checkpoint-2"])
def test_a_run_of_another_minor_version_resumes_where_its_keys_are_valid(
    way: str, copy: Path, monkeypatch: pytest.MonkeyPatch, sentence: Callable[..., None]
) -> None:
    monkeypatch.chdir(copy.parents[1])
    words = [w for w in WORDS if w != "train"]
    run = check.check_config(compose_config([*words, f"resume={way}"]))
    path, saved = Path("runs/smoke/config.yaml"), copy / "checkpoint-2" / "trainer" / "state.json"
    text = path.read_text()
    assert text.startswith(f"# Written by rloo {__version__}\n")
    path.write_text(text.replace(__version__, "0.9.1", 1))
    assert resume.plan_resume(path.parent, run).checkpoint is not None
    for file in (path, saved):
        file.write_text(re.sub(r'max_grad_norm("?:)', r"top_grad_norm\1", file.read_text()))
    sealed(copy / "checkpoint-2")
    with pytest.raises(ConfigError) as refused:
        resume.plan_resume(path.parent, run)
    problem = assert_refused(refused, 2, key="0.9.1", where=str(path), fix="rloo 0.9.1")
    assert "train.max_grad_norm: Field required" in problem.why
    if way == "auto":
        sentence(refused)
        with pytest.raises(ConfigError) as refused:
            eval_target_of_run(str(path.parent), [])
        assert_refused(refused, 2, key="0.9.1", where=str(path), fix="rloo 0.9.1")


def test_what_does_not_change_the_run_may_change_and_is_printed(copy: Path, forked: Forked) -> None:
    free = ("logging.every=2", "checkpoint.every=5", "max_steps=4", "train.micro_batch_size=4")
    assert forked(*WORDS, *free, "resume=auto") == 0
    said = forked.said()
    assert "max_steps: 3 -> 4" in said
    facts = read_json(copy / "run.json")
    assert facts["changes"][0]["max_steps"] == [3, 4] and facts["progress"]["step"] == 4
    assert "max_steps: 4" in (copy / "config.yaml").read_text()


def test_a_change_that_was_allowed_is_recorded(copy: Path, forked: Forked) -> None:
    words = ("algorithm.beta=0.2", "resume=auto", "resume_allow_changes=true")
    assert forked(*WORDS, *words) == 0, forked.said()
    assert read_json(copy / "run.json")["changes"][0]["algorithm.beta"] == [0.05, 0.2]


def test_data_that_grew_is_refused_and_the_run_is_left_as_it_was(
    forked: Forked, sentence: Callable[..., None]
) -> None:
    rows = [json.dumps({"prompt": f"Say {i}"}) for i in range(12)]
    data = forked.folder / "mine.jsonl"
    data.write_text("\n".join(rows))
    words = (*WORDS, "data.path=mine.jsonl", "data.eval_split=null")
    assert forked(*words, faults=STOP) == 75, forked.said()
    data.write_text("\n".join([*rows, json.dumps({"prompt": "Say more"})]))
    run = forked.folder / "runs" / "smoke"
    before = state(run)
    assert forked(*words, "resume=auto") == 4
    ended = Ended(4, "", forked.said())
    assert_refused(ended, 4, key="the data has changed")
    sentence(ended)
    assert state(run) == before
    assert forked(*words, "resume=auto", "resume_allow_changes=true") == 0, forked.said()
    (change,) = read_json(run / "run.json")["changes"]
    old, new = change["data (fingerprint)"]
    assert change["attempt"] == 2 and old != new


def test_the_optimizer_of_another_model_is_refused(copy: Path, forked: Forked) -> None:
    checkpoint = copy / "checkpoint-2"
    path = checkpoint / "trainer" / "optimizer-1-of-1.safetensors"
    tensors = load_file(path)
    renamed = {n.replace("embed", "other"): t for n, t in tensors.items()}
    save_file(renamed, path)
    (checkpoint / manifest.MANIFEST_FILE).unlink()
    manifest.write_manifest(checkpoint, {"step": 2})
    assert forked(*WORDS, "resume=auto") == 2
    assert_refused(Ended(2, "", forked.said()), key="optimizer")


# Hostile ones: sealed by a right manifest, and still nothing of them is run.


def sealed(checkpoint: Path) -> None:
    """A manifest as a save would have written it."""
    (checkpoint / manifest.MANIFEST_FILE).unlink()
    manifest.write_manifest(checkpoint, {"step": 2})


CANARY = "open({path!r}, 'w').close()"


def remote_code(checkpoint: Path, canary: Path) -> None:
    values = json.loads((checkpoint / "config.json").read_text())
    code = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    values |= {"model_type": "mine", "auto_map": code}
    (checkpoint / "config.json").write_text(json.dumps(values))
    (checkpoint / "mine.py").write_text(CANARY.format(path=str(canary)))


class Bomb:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


def pickled(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with (checkpoint / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Bomb(str(canary)), file)


def pickled_optimizer(checkpoint: Path, canary: Path) -> None:
    with (checkpoint / "trainer" / "optimizer-1-of-1.safetensors").open("wb") as file:
        pickle.dump(Bomb(str(canary)), file)


def state_of_another(checkpoint: Path, canary: Path) -> None:
    (checkpoint / "trainer" / "state.json").write_text('{"_target_": "os.system"}')


def unknown_counter(checkpoint: Path, canary: Path) -> None:
    path = checkpoint / "trainer" / "state.json"
    values = json.loads(path.read_text())
    values["state"]["__class__"] = 1
    path.write_text(json.dumps(values))


@pytest.mark.slow_but("remote_code", "unknown_counter")
@pytest.mark.parametrize(
    "spoil", [remote_code, pickled, pickled_optimizer, state_of_another, unknown_counter]
)
def test_a_hostile_checkpoint_is_refused_and_leaves_no_trace(
    spoil: Callable[[Path, Path], None], copy: Path, forked: Forked
) -> None:
    canary = forked.folder / "canary"
    spoil(copy / "checkpoint-2", canary)
    sealed(copy / "checkpoint-2")
    code = forked(*WORDS, "resume=runs/smoke/checkpoint-2")
    said = forked.said()
    assert code == 2 and "Traceback" not in said and "bug" not in said, said
    assert not canary.exists()


def test_a_manifest_that_names_files_outside_its_folder_is_refused(copy: Path) -> None:
    checkpoint = copy / "checkpoint-2"
    values = json.loads((checkpoint / manifest.MANIFEST_FILE).read_text())
    values.pop("digest")
    values["files"]["../config.yaml"] = values["files"]["config.json"]
    values["digest"] = manifest._digest_values(values)
    (checkpoint / manifest.MANIFEST_FILE).write_text(json.dumps(values))
    assert "../config.yaml is missing" in (manifest.checkpoint_problem(checkpoint) or "")
