"""`rloo push`: the model and a card that says how it was made, and nothing of this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from assert_refused import assert_refused
from compare_cases import write
from push_cases import PushHub, push_hub

from rloo_cli.cli import push
from rloo_cli.inspection.model_card import model_card, public_text
from rloo_cli.inspection.run_record import inspect_run_folder
from rloo_cli.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub() -> Iterator[PushHub]:
    with push_hub() as hub:
        yield hub


def make_run() -> Path:
    folder = write(Path("runs"), "mine", data__path=str(Path.home() / "posts.jsonl"))
    (folder / "final").mkdir()
    (folder / "final/config.json").write_text("{}")
    (folder / "final/model.safetensors").write_bytes(b"weights")
    (folder / "checkpoint-2/trainer").mkdir(parents=True)
    (folder / "checkpoint-2/config.json").write_text("{}")
    (folder / "checkpoint-2/trainer/state.json").write_text("{}")
    (folder / "checkpoint-2/MANIFEST.json").write_text("{}")
    home = Path.home()
    words = ["+recipe=my.yaml", f"root={home}/runs", f"reward.f.path={home}/r.py:f", "seed=2"]
    (folder / "overrides.txt").write_text("\n".join(words))
    (folder / "env.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": "2.13"}}))
    return folder


def pushed(hub: PushHub, *words: str) -> "subprocess.CompletedProcess[str]":
    """The verb in a process of its own: huggingface_hub reads HF_ENDPOINT when it is imported."""
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_none", "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-m", "rloo_cli", "push", *words], env=env, capture_output=True, text=True
    )


def test_the_card_has_the_interval_of_a_held_out_score() -> None:
    folder = make_run()
    path = folder / "metrics.jsonl"
    limits = '"eval_reward/low": 0.76, "eval_reward/high": 0.84'
    path.write_text(path.read_text().replace('"eval_reward":', f'{limits}, "eval_reward":'))
    card = model_card(inspect_run_folder(folder))
    assert "| held-out | 0 (0.76 to 0.84) | 1 (0.76 to 0.84) |" in card


def test_the_card_says_how_it_was_made_and_nothing_of_this_machine() -> None:
    card = model_card(inspect_run_folder(make_run()))
    assert "| held-out | 0 | 1 |" in card and "| torch | 2.13 |" in card
    assert "rloo train +recipe=my.yaml reward.f.path=(local) seed=2" in card
    assert str(Path.home()) not in card and "posts.jsonl" not in card
    assert public_text("a/b") == "a/b" and public_text("./x.py:f") == "(local)"
    assert public_text("[org/data,/home/me/x]") == "[org/data,(local)]"


@pytest.mark.process
def test_a_model_is_pushed_privately_and_again(hub: PushHub) -> None:
    make_run()
    done = pushed(hub, "mine", "--repo", "org/mine", "--json")
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["private"] and got["files"] == ["config.json", "model.safetensors"]
    assert hub.private == {"org/mine": True}
    assert hub.files["org/mine"]["model.safetensors"] == b"weights"
    assert b"Held-out scores" in hub.files["org/mine"]["README.md"]
    assert pushed(hub, "mine", "--repo", "org/mine").returncode == 0
    hub.private["org/mine"] = False
    done = pushed(hub, "mine", "--repo", "org/mine")
    assert done.returncode == 2 and "org/mine is public" in done.stderr


@pytest.mark.process
def test_a_name_alone_is_a_repository_of_the_account(hub: PushHub) -> None:
    make_run()
    for _ in range(2):
        done = pushed(hub, "mine", "--repo", "named", "--json")
        assert done.returncode == 0, done.stderr
    assert hub.private == {"account/named": True} and hub.commits == 2


@pytest.mark.process
def test_a_push_has_a_message_and_may_go_to_a_branch(hub: PushHub) -> None:
    make_run()
    done = pushed(hub, "mine", "--repo", "org/mine", "--message", "m1", "--revision", "b1")
    assert done.returncode == 0, done.stderr
    assert hub.branches == ["b1"]
    assert hub.said == ["m1"]


@pytest.mark.process
def test_a_hub_that_refuses_is_10(hub: PushHub) -> None:
    make_run()
    hub.refuses = 403
    done = pushed(hub, "mine", "--repo", "org/mine")
    assert done.returncode == 10 and "org/mine" in done.stderr


def test_a_dry_run_sends_nothing_and_a_checkpoint_leaves_its_trainer_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run()
    assert push.run(["mine", "--dry-run", "--checkpoint", "checkpoint-2", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["files"] == ["config.json"] and got["card"].startswith("---\n")
    assert push.run(["mine", "--dry-run"]) == 0
    assert "MiB  model.safetensors" in capsys.readouterr().out


def test_what_is_not_there_is_refused() -> None:
    folder = make_run()
    for words, key in (
        (["mine"], "--repo"), (["mine", "--repo", "a/b/c"], "a/b/c"),
        (["mine", "--dry-run", "--checkpoint", "checkpoint-3"], "checkpoint-3"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            push.run(words)
        assert_refused(caught, 2, key)
    (folder / "final/config.json").unlink()
    with pytest.raises(ConfigError, match="checkpoint-2"):
        push.run(["mine", "--dry-run"])
