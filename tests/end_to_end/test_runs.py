"""Real runs of tiny models: what a run leaves, and how it ends when it does not end well."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from cli_cases import Ended, Rloo, strict, surroundings
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo_cli.api import train
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.utils import fault_injection
from rloo_cli.utils.errors import RewardError
from rloo_cli.utils.files import read_json

RUN_FILES = (
    "config.yaml overrides.txt env.json run.json metrics.jsonl summary.json curves.png"
    " samples/step_000001.jsonl samples/step_000002.jsonl samples/eval_000000.jsonl"
    " samples/eval_000002.jsonl logs/attempt_1/rank_0.log final/config.json"
    " final/model.safetensors final/tokenizer.json final/generation_config.json"
)


# One run, and what it leaves.


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rloo, Ended]:
    """A folder in which `rloo train +recipe=smoke` was run."""
    base = tmp_path_factory.getbasetemp()
    rloo = Rloo(tmp_path_factory.mktemp("smoke"), surroundings(base))
    return rloo, rloo("train", "+recipe=smoke")


@pytest.mark.smoke
def test_a_run_ends_well_and_says_where_things_are(
    smoke: tuple[Rloo, Ended], sentence: Callable[..., None]
) -> None:
    rloo, ended = smoke
    assert ended.code == 0 and ended.err == "", ended.said
    first, then, *_ = ended.out.splitlines()  # before anything that takes long
    sentence(first)
    assert then.startswith("starting: ")
    for line in ("step 1/2  reward", "step 2/2  reward", "held out", "  prompt  "):
        assert line in ended.out
    assert "\r" not in ended.out and "\x1b" not in ended.out  # not a terminal
    for name in ("final", "curves.png", "metrics.jsonl", "samples"):
        assert f"runs/smoke/{name}\n" in ended.out
        assert (rloo.folder / "runs" / "smoke" / name).exists()


@pytest.mark.smoke
def test_a_run_leaves_its_files_and_no_others(smoke: tuple[Rloo, Ended]) -> None:
    rloo, _ = smoke
    run = rloo.folder / "runs" / "smoke"
    left = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    assert {*RUN_FILES.split()} <= left
    assert not [name for name in left if "tmp" in name or ".hydra" in name]
    assert {p.name for p in rloo.folder.iterdir()} == {"runs"}


@pytest.mark.smoke
def test_what_a_run_writes_can_be_read_again(smoke: tuple[Rloo, Ended]) -> None:
    rloo, _ = smoke
    run = rloo.folder / "runs" / "smoke"
    frozen = check.check_config(compose_config(["+recipe=smoke"]))
    assert check.dump_config(check.read_config(run / "config.yaml")) == check.dump_config(frozen)
    assert yaml.safe_load((run / "config.yaml").read_text())["algorithm"]["beta"] == 0.05
    assert (run / "overrides.txt").read_text() == "+recipe=smoke\n"
    facts = read_json(run / "run.json")
    assert (facts["state"], facts["code"], facts["recipe"]) == ("finished", 0, "smoke")
    assert facts["hash"] == check.config_hash(frozen) and facts["fingerprint"]
    assert facts["progress"]["step"] == 2 and facts["progress"]["episodes"] == 32
    assert {"torch", "transformers", "rloo-cli"} <= set(read_json(run / "env.json")["packages"])


@pytest.mark.smoke
def test_metrics_and_samples_are_strict_json_with_one_line_per_step(
    smoke: tuple[Rloo, Ended],
) -> None:
    rloo, _ = smoke
    run = rloo.folder / "runs" / "smoke"
    rows = strict(run / "metrics.jsonl")
    assert [(r["step"], "reward" in r, "eval_reward" in r) for r in rows] == [
        (0, False, True),
        (1, True, False),
        (2, True, False),
        (2, False, True),
    ]
    for row in rows[1:3]:
        for name in ("reward_std", "kl", "entropy", "num_tokens", "step_time", "grad_norm"):
            assert name in row
    for step in (1, 2):
        samples = strict(run / "samples" / f"step_00000{step}.jsonl")
        assert len(samples) == 16
        assert {"prompt", "completion", "score", "reward", "advantage"} <= set(samples[0])
        assert set(samples[0]["rewards"]) == {"unique_chars", "length_tokens"}
    summary = read_json(run / "summary.json")
    assert (summary["steps"], summary["updates"]) == (2, 2)
    assert (summary["before"], summary["after"]) == (rows[0]["eval_reward"], rows[3]["eval_reward"])


@pytest.mark.smoke
def test_the_final_model_is_one_that_transformers_loads(smoke: tuple[Rloo, Ended]) -> None:
    rloo, _ = smoke
    run = rloo.folder / "runs" / "smoke"
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    ids = tokenizer("Name 5 things", return_tensors="pt")
    logits = model(**ids).logits
    assert logits.shape[1] == ids["input_ids"].shape[1] and torch.isfinite(logits).all()
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_run_again_is_nothing_to_do(smoke: tuple[Rloo, Ended]) -> None:
    rloo, _ = smoke
    before = {p: p.stat().st_mtime for p in rloo.folder.rglob("*")}
    ended = rloo("train", "+recipe=smoke", timeout=30)
    assert ended.code == 0 and "nothing to do" in ended.out
    assert {p: p.stat().st_mtime for p in rloo.folder.rglob("*")} == before


# Other ways to run.


def test_any_recipe_runs_on_a_laptop_with_debug_cpu(rloo: Rloo) -> None:
    ended = rloo("train", "+recipe=tldr_1b", "+debug=cpu")
    assert ended.code == 0, ended.said
    rows = strict(rloo.folder / "runs" / "debug" / "tldr_1b" / "metrics.jsonl")
    assert rows[-1]["step"] == 2 and "reward/tldr_rm/mean" in rows[1]
    assert rows[2]["updates"] == 8  # two steps of 2 iterations x 2 mini-batches


@pytest.mark.slow
def test_a_sweep_leaves_one_run_directory_per_job(rloo: Rloo) -> None:
    words = ["train", "--multirun", "+recipe=smoke", "algorithm.beta=0.0,0.05"]
    ended = rloo(*words, "logging.samples=0")
    assert ended.code == 0, ended.said
    assert ended.out.endswith("2 jobs, 0 failed\n")
    runs = sorted((rloo.folder / "runs").iterdir())
    assert len(runs) == 2 and all(run.name.startswith("smoke-") for run in runs)
    betas = {yaml.safe_load((r / "config.yaml").read_text())["algorithm"]["beta"] for r in runs}
    assert betas == {0.0, 0.05}
    for run in runs:
        assert read_json(run / "run.json")["state"] == "finished"
    assert {p.name for p in rloo.folder.iterdir()} == {"runs"}
    assert rloo(*words, "logging.samples=0").out.count("nothing to do") == 2


@pytest.fixture
def here(rloo: Rloo, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For runs in this process: the same folder and cache."""
    monkeypatch.chdir(rloo.folder)
    monkeypatch.setenv("RLOO_CACHE", rloo.environment["RLOO_CACHE"])
    return rloo.folder


def test_python_trains_with_rewards_of_its_own(here: Path) -> None:
    calls = []

    def brevity(completions: list[str], **kwargs: object) -> list[float]:
        calls.append(len(completions))
        return [-len(text) / 100 for text in completions]

    async def constant(prompts: list[str]) -> list[float]:
        return [1.0 for _ in prompts]

    words = ["reward.constant.weight=0.5", "max_steps=1", "logging.samples=0"]
    # An earlier run of this process was to break; this one is not.
    fault_injection._armed.append(fault_injection._Fault("load", 1, "raise", "", 0))
    summary = train("smoke", rewards={"brevity": brevity, "constant": constant}, overrides=words)
    assert summary["steps"] == 1 and summary["folder"] == "runs/smoke"
    assert calls == [16, 16, 16]  # held out before, one step of 4 x 4, held out after
    row = strict(here / "runs" / "smoke" / "metrics.jsonl")[1]
    assert row["reward/constant/mean"] == 1.0 and row["reward/brevity/mean"] < 0
    assert row["reward"] == pytest.approx(0.5 + row["reward/brevity/mean"])
    again = train("smoke", rewards={"brevity": brevity, "constant": constant}, overrides=words)
    assert again == summary and len(calls) == 3


def test_python_gets_the_error_a_command_would_have_printed(here: Path) -> None:
    def broken(completions: list[str]) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="16"):
        train("smoke", rewards={"broken": broken})
    assert read_json(here / "runs" / "smoke" / "run.json")["state"] == "failed"
