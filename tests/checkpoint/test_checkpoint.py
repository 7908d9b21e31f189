"""Saves, one at a time: their order on the disk, what they refuse, and what they hold."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_cases import alone, flat, step
from resume_cases import temporaries
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_cli.checkpoint import manifest, restore, rollback, save
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.train import worker
from rloo_cli.utils import fault_injection
from rloo_cli.utils.errors import ConfigError, MachineError, StorageError

EVERY = ("max_steps=9", "train.learning_rate=0.01")


def saved(folder: Path, *words: str, steps: int = 1) -> Any:
    """A run that has done some steps, each saved."""
    run = alone(folder, *EVERY, *words)
    for _ in range(steps):
        step(run)
        assert save.save_checkpoint(run, raise_on_failure=True)
    return run


def test_a_save_is_on_the_disk_before_it_gets_its_name_and_prunes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path, steps=2)
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda f: [done.append(("sync", os.readlink(f"/proc/self/fd/{f}"))), fsync(f)]
    )
    monkeypatch.setattr(
        Path, "rename", lambda a, b: [done.append(("rename", str(b))), rename(a, b)][1]
    )
    step(run)
    save.save_checkpoint(run, raise_on_failure=True)
    named = done.index(("rename", str(run.folder / "checkpoint-3")))
    temporary = run.folder / ".tmp-checkpoint-3-a1"
    files = [p.relative_to(run.folder / "checkpoint-3") for p in
             (run.folder / "checkpoint-3").rglob("*")]  # fmt: skip
    before = [path for what, path in done[:named] if what == "sync"]
    for path in [*files, Path()]:
        shown = str(temporary / path)
        if path.name == manifest.MANIFEST_FILE:  # written under another name, then renamed
            assert any(f".{manifest.MANIFEST_FILE}." in p for p in before)
        else:
            assert shown in before, path
    order = [p for p in before if p == str(temporary) or f".{manifest.MANIFEST_FILE}." in p]
    assert order[-1] == str(temporary) and len(order) > 1  # the folder after its manifest
    weights = before.index(str(temporary / "model.safetensors"))
    assert weights < before.index(order[0])  # the manifest after the files it accounts for
    after = done[named + 1 :]
    latest = next(i for i, (w, p) in enumerate(after) if w == "sync" and ".latest." in p)
    trash = after.index(("rename", str(run.folder / ".trash-checkpoint-1-a1")))
    assert ("sync", str(run.folder)) in after[:latest] and latest < trash
    assert ("sync", str(run.folder)) in after[trash:]
    assert [p.name for p in manifest.list_checkpoints(run.folder)] == [
        "checkpoint-3",
        "checkpoint-2",
    ]


def test_a_checkpoint_of_the_same_step_is_kept_and_a_damaged_one_is_moved_aside(
    tmp_path: Path,
) -> None:
    run = saved(tmp_path)
    folder = run.folder / "checkpoint-1"
    before = (folder / manifest.MANIFEST_FILE).stat().st_mtime_ns
    assert save.save_checkpoint(run) is None  # nothing is new
    run.saved_position = (0, -1)
    assert save.save_checkpoint(run) == folder
    assert (folder / manifest.MANIFEST_FILE).stat().st_mtime_ns == before
    (folder / "model.safetensors").write_bytes(b"x")
    run.saved_position = (0, -1)
    assert save.save_checkpoint(run) == folder and manifest.checkpoint_problem(folder) is None
    assert (run.folder / "checkpoint-1.attempt1").is_dir()


def test_without_renames_the_manifest_alone_marks_a_checkpoint(tmp_path: Path) -> None:
    run = alone(tmp_path, *EVERY)
    run.has_atomic_rename = False
    fault_injection._armed.append(fault_injection._parse_fault("ckpt.manifest@1=raise"))
    try:
        step(run)
        assert save.save_checkpoint(run) is None and not manifest.list_checkpoints(run.folder)
        assert (
            save.save_checkpoint(run)
            and manifest.checkpoint_problem(run.folder / "checkpoint-1") is None
        )
    finally:
        fault_injection._armed.clear()
    assert rollback.can_rename_folders(tmp_path, 1) is True and not temporaries(tmp_path)
    assert rollback.can_rename_folders(tmp_path / "nothing", 1) is False


def test_weights_that_were_not_all_written_are_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path)
    write = type(run.policy.model).save_pretrained

    def lose(model: Any, folder: Path) -> None:
        write(model, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(type(run.policy.model), "save_pretrained", lose)
    step(run)
    with pytest.raises(StorageError, match="elements"):
        save.save_checkpoint(run, raise_on_failure=True)
    assert [p.name for p in manifest.list_checkpoints(run.folder)] == ["checkpoint-1"]
    assert not temporaries(run.folder)


def test_a_checkpoint_gives_the_logits_of_the_run(tmp_path: Path) -> None:
    run = saved(tmp_path)
    folder = run.folder / "checkpoint-1"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Name 5 things", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    run.policy.model.eval()
    with native_attention(run.policy.model):
        assert torch.equal(model(**ids).logits, run.policy.model(**ids).logits)


def test_half_precision_keeps_its_float32_masters(tmp_path: Path) -> None:
    words = ("model.dtype=bfloat16", "train.learning_rate=1e-5")
    run = saved(tmp_path, *words)
    (tmp_path / "again").mkdir()
    again = alone(tmp_path / "again", *EVERY, *words)
    restore.restore_run(again, run.folder / "checkpoint-1")
    for one, other in zip(run.optimizer.masters, again.optimizer.masters, strict=True):
        assert torch.equal(one, other) and one.dtype is torch.float32
    again.policy.model.load_state_dict(run.policy.model.state_dict())
    moved, *_ = step(run)
    same, *_ = step(again)
    assert torch.equal(moved, same) and moved.abs().max() > 0
    assert torch.equal(flat(run), flat(again))


def test_a_learning_rate_that_is_not_what_it_was_stops_the_run(tmp_path: Path) -> None:
    run = saved(tmp_path)
    tensors, facts = run.optimizer.dump()
    facts["learning_rate"] *= 2
    with pytest.raises(ConfigError, match="learning rate"):
        run.optimizer.restore(tensors, facts)


def test_an_optimizer_that_only_a_pickle_could_hold_is_refused(tmp_path: Path) -> None:
    run = alone(tmp_path, *EVERY)
    step(run)
    run.optimizer.inner.state[run.optimizer.masters[0]]["history"] = [torch.zeros(1)]
    with pytest.raises(StorageError, match="pickle"):
        run.optimizer.dump()


@pytest.mark.parametrize("how", ["stop", "warn"])
def test_too_little_disk_is_said_before_the_first_step(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = alone(tmp_path, *EVERY, f"checkpoint.on_low_disk={how}")
    notes: list[str] = []
    run.log.note = notes.append  # type: ignore[method-assign]
    need = 3 * save.estimated_checkpoint_bytes(run)
    step(run)
    size = sum(p.stat().st_size for p in save.save_checkpoint(run).rglob("*"))  # type: ignore[union-attr]
    assert 0.8 < size / save.estimated_checkpoint_bytes(run) < 1.5
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need - 1))
    if how == "stop":
        with pytest.raises(MachineError, match="GB are free"):
            save.check_checkpoint_space(run)
        return
    save.check_checkpoint_space(run)
    assert "GB are free" in notes[0]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    step(run)
    assert save.save_checkpoint(run) is None and "checkpoint-2 was not saved" in notes[1]


def test_a_run_that_should_have_done_steps_and_did_none_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="9 were due"):
        worker._write_results(alone(tmp_path, *EVERY), 0, 0.0, 0.0)


def test_only_what_is_provably_ours_is_removed(tmp_path: Path) -> None:
    ours = [
        ".tmp-checkpoint-3-a1",
        ".trash-checkpoint-1-a2",
        ".tmp-final-a1",
        ".run.json.9999977.tmp",
    ]
    others = [".tmp-checkpoint-3-a9", ".tmp-mine", ".git", ".notes.tmp", "checkpoint-x"]
    others.append(f".run.json.{os.getppid()}.tmp")  # the launcher is about to write it
    for name in [*ours, *others]:
        (tmp_path / name).mkdir() if "json" not in name else (tmp_path / name).write_text("")
    rollback.roll_back_folder(ResumePlan(tmp_path, attempt=2))
    assert {p.name for p in tmp_path.iterdir()} == {*others}


@pytest.mark.parametrize(
    ("text", "allowed", "said"),
    [
        ("step=kill9", "0", "needs RLOO_ALLOW_FAULTS=1"),
        ("step=explode", "1", "is not a valid fault"),
        ("step@x=kill9", "1", "is not a valid fault"),
    ],
)
def test_faults_need_a_second_word_and_are_read_strictly(
    text: str, allowed: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLOO_FAULTS", text)
    monkeypatch.setenv("RLOO_ALLOW_FAULTS", allowed)
    with pytest.raises(ConfigError, match=said):
        fault_injection.arm_faults()


def test_a_fault_strikes_once_at_its_count_and_only_on_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLOO_ALLOW_FAULTS", "1")
    monkeypatch.setenv("RLOO_FAULTS", "gen.*@2=skip; loss@1=nan; step@1=raise#1")
    fault_injection.arm_faults()
    try:
        assert [
            fault_injection.trigger_fault(n) for n in ("gen.chunk", "gen.request", "gen.chunk")
        ] == [
            None,
            "skip",
            None,
        ]
        assert (
            fault_injection.poison_tensor("loss", 1.0) != 1.0
            and fault_injection.poison_tensor("loss", 1.0) == 1.0
        )
        assert fault_injection.trigger_fault("step") is None
    finally:
        fault_injection._armed.clear()
