"""A run never trains on tokens of other weights than it believes: real vLLM, and lies."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_cases
from cli_cases import Rloo
from transformers import AutoModelForCausalLM
from vllm_cases import Real

from rloo_cli.data.synthetic import tiny

pytestmark = pytest.mark.vllm
STEPS = ("max_steps=3", "eval.max_samples=4")


class Trained:
    """A run against the shared server, in a process of its own."""

    def __init__(
        self, root: Path, fast: dict[str, str], server: Real, *words: str, faults: str = ""
    ):
        env = fast | {"RLOO_SERVER_TOKEN": server.token}
        if faults:
            env |= {"RLOO_FAULTS": faults, "RLOO_ALLOW_FAULTS": "1"}
        self.root = root
        url = f"generation.server.base_url={server.url}"
        given = ["+recipe=smoke", *vllm_cases.WORDS, url, *STEPS, *words]
        self.process = Rloo(root, env).start("train", *given)

    @property
    def rows(self) -> list[dict[str, Any]]:
        file = self.root / "runs" / "smoke" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [row for row in map(json.loads, lines) if "step_time" in row]

    def refused(self) -> str:
        """It ended with 6; what it said."""
        code, said = self.process.wait(120), (self.root / "out").read_text()
        assert code == 6, said
        return said

    def until_step(self, number: int) -> None:
        end = time.monotonic() + 120
        while len(self.rows) < number:
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.slow_but("sync.start-:0, the trainer", "sync.version-:0, the trainer")
@pytest.mark.parametrize(
    ("phase", "got"),
    [
        ("sync.start", ":0, the trainer"),
        ("sync.update", "weights are missing: "),
        ("sync.finish", ":0, the trainer"),
        ("sync.version", ":0, the trainer"),
    ],
)
def test_a_sync_that_is_left_out_stops_the_run_before_the_next_update(
    tmp_path: Path, fast: dict[str, str], server: Real, phase: str, got: str
) -> None:
    run = Trained(tmp_path, fast, server, faults=f"{phase}@2=skip")
    assert got in run.refused()
    assert [row["step"] for row in run.rows] in ([], [1])  # a step is logged after its sync


HANGS = "gen.request@29=hang:8"  # parity 8, evaluation 4, step 1 has 16: the first of step 2


def test_weights_that_change_behind_our_back_under_the_right_label_stop_the_run(
    tmp_path: Path, fast: dict[str, str], server: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = vllm_cases.engine(vllm_cases.config(server.url), tmp_path)
    weights = vllm_cases.weights()
    weights.model = strange()
    run = Trained(tmp_path, fast, server, faults=HANGS)
    run.until_step(1)
    monkeypatch.setenv("RLOO_SERVER_TOKEN", server.token)
    other.connect()
    label = other.http_client.get(server.url, "/weight_info", server.token, 30)["weight_version"]
    assert other.sync_weights(weights, label) == label
    other.close()
    said = run.refused()
    assert "log-probabilities differ by" in said and "at most 0.02" in said
    assert [row["step"] for row in run.rows] == [1]


def test_another_trainer_that_takes_the_server_stops_the_run(
    tmp_path: Path, fast: dict[str, str], server: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, weights = (
        vllm_cases.engine(vllm_cases.config(server.url), tmp_path),
        vllm_cases.weights(),
    )
    run = Trained(tmp_path, fast, server, faults=HANGS)
    run.until_step(1)
    monkeypatch.setenv("RLOO_SERVER_TOKEN", server.token)
    other.connect()
    assert other.sync_weights(weights, "somebody:7") == "somebody:7"
    other.close()
    assert "somebody:7" in run.refused()
    assert [row["step"] for row in run.rows] == [1]


def test_another_model_behind_the_url_is_refused_before_anything_is_sent(
    tmp_path: Path, fast: dict[str, str], server: Real
) -> None:
    folder = tmp_path / "other"
    model = strange()
    model.save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    run = Trained(tmp_path, fast, server, f"model.path={folder}")
    said = run.refused()
    assert f"{folder}, found make:tiny" in said
    assert run.rows == []


def strange() -> Any:
    """A model of the same shape, far from what anybody trained."""
    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model_folder(), dtype=torch.float32)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.smoke
def test_every_row_says_its_weights_and_every_step_how_far_off_the_sampler_was(
    tmp_path: Path, fast: dict[str, str], server: Real
) -> None:
    run = Trained(tmp_path, fast, server)
    assert run.process.wait(120) == 0, (tmp_path / "out").read_text()
    assert [row["step"] for row in run.rows] == [1, 2, 3]
    assert all(row["sampling/logp_diff_max"] < 1e-3 for row in run.rows)
    assert all(row["sampling/missing_frac"] == 0 for row in run.rows)
    samples = sorted((tmp_path / "runs" / "smoke" / "samples").glob("step_*.jsonl"))
    for number, file in enumerate(samples):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert rows and {row["weight_version"] for row in rows} == {number}
