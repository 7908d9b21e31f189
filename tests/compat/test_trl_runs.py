"""What TRL's own scripts use of a trainer, in runs: they work with only their imports changed."""

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from assert_refused import assert_refused
from datasets import Dataset
from family_cases import EXPERTS, HEADS
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from rloo_cli import api
from rloo_cli.cli import push
from rloo_cli.compat import trl
from rloo_cli.compat.trl import GRPOTrainer, RLOOConfig, RLOOTrainer
from rloo_cli.compat.trl_callbacks import CallbackEvents, sort_callbacks
from rloo_cli.config import synthetic
from rloo_cli.plugin import Events
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

ROWS = Dataset.from_list([{"prompt": f"Say {n}: "} for n in range(16)])
SMALL = {"max_completion_length": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
TWO_RANKS = """
import sys
from datasets import Dataset
from rloo_cli.compat.trl import RLOOConfig, RLOOTrainer

model, folder, size = sys.argv[1:]

def length(completions, **kwargs):
    return [float(len(c.encode())) for c in completions]

data = Dataset.from_list([{"prompt": f"Say {n}: "} for n in range(16)])
args = RLOOConfig(folder, max_steps=2, per_device_train_batch_size=int(size),
                  max_completion_length=6, learning_rate=1e-3, report_to="none")
trainer = RLOOTrainer(model, length, args, data)
trainer.train()
trainer.save_model(f"{folder}_saved")
trainer.accelerator.print("ranks:", trainer.accelerator.num_processes)
"""


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c.encode())) for c in completions]


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    """A tiny model's folder; the current folder is a new one."""
    monkeypatch.chdir(tmp_path)
    return str(synthetic.resolve_model_path("make:tiny"))


def trainer_of(model: Any, **given: Any) -> RLOOTrainer:
    settings = {"output_dir": "out", "max_steps": 2} | SMALL | given.pop("settings", {})
    return RLOOTrainer(model, length, RLOOConfig(**settings), ROWS, **given)


def test_a_trainer_has_what_scripts_ask_for_after_the_training(model, capsys):
    trainer = trainer_of(model, eval_dataset=ROWS.select(range(4)))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    output = trainer.train()
    assert trainer.state.global_step == output.global_step == 2
    assert [e["step"] for e in trainer.state.log_history] == [1, 2, 2]
    assert "rewards/length/mean" in trainer.state.log_history[0]
    assert trainer.state.log_history[-1]["train_loss"] == output.training_loss
    after = dict(trainer.model.named_parameters())
    assert any(not torch.equal(before[n], after[n]) for n in before)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", {"b": 2, "a": 1})
    trainer.save_metrics("train", {"a": 1})
    trainer.save_metrics("eval", {"b": 2})
    trainer.accelerator.print("said once")
    said = capsys.readouterr().out
    assert "***** train metrics *****\n  a" in said and "said once" in said
    assert json.loads(Path("out/all_results.json").read_text()) == {"a": 1, "b": 2}
    assert json.loads(Path("out/trainer_state.json").read_text())["global_step"] == 2
    saved = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert all(torch.equal(p, after[n]) for n, p in saved.named_parameters())
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model
    trainer.end()


def test_evaluate_scores_the_model_as_it_is_and_changes_nothing_in_the_run(model):
    trainer = trainer_of(model, eval_dataset=ROWS.select(range(4)))
    first = trainer.evaluate()
    assert first["eval_samples"] == 4 and "eval_reward" in first
    assert not Path("out").exists()
    trainer.train()
    files = {p for p in Path("out").rglob("*") if p.is_file()}
    again = trainer.evaluate({"a": ROWS.select(range(2))}, metric_key_prefix="test")
    assert again["test_a_samples"] == 2
    assert {p for p in Path("out").rglob("*") if p.is_file()} == files
    with pytest.raises(ConfigError, match="has no data"):
        trainer_of(model, settings={"output_dir": "other"}).evaluate()


def test_an_adapter_is_loaded_over_its_base_and_evaluated(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    trainer = trainer_of(model, peft_config=config, eval_dataset=ROWS.select(range(2)))
    names = {n for n, _ in trainer.model.named_parameters()}
    trainer.train()
    assert {n for n, _ in trainer.model.named_parameters()} == names
    assert trainer.evaluate()["eval_samples"] == 2


class Stops(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.heard.append("begin")

    def on_step_end(self, args, state, control, **kwargs):
        self.heard.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == 2

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(f"log {logs['step']}")

    def on_train_end(self, args, state, control, **kwargs):
        self.heard.append("end")


def test_a_callback_of_transformers_ends_the_run_which_is_then_finished(model):
    stops = Stops()
    trainer = trainer_of(model, callbacks=[stops], settings={"max_steps": 6, "logging_steps": 2})
    assert trainer.train().global_step == 2
    assert stops.heard == ["begin", "step 1", "step 2", "log 2", "end"]
    run = json.loads(Path("out/run.json").read_text())
    assert run["state"] == "finished" and Path("out/final/config.json").is_file()
    assert trainer_of(model, settings={"max_steps": 6, "logging_steps": 2}).train().global_step == 2


def test_an_error_in_a_callback_ends_the_run_and_is_raised(model):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyError("mine")

    trainer = trainer_of(model, callbacks=[Fails], settings={"max_steps": 6})
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    assert json.loads(Path("out/summary.json").read_text())["updates"] == 1


class NeedsModel(TrainerCallback):
    def on_train_begin(self, args, state, control, model, **kwargs): ...


class NeedsSubsteps(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs): ...


@pytest.mark.parametrize(
    ("callback", "key"),
    [
        (print, "print"),
        (NeedsModel(), "NeedsModel.on_train_begin"),
        (NeedsSubsteps, "NeedsSubsteps.on_substep_end"),
    ],
    ids=["function", "model", "substeps"],
)
def test_a_callback_that_cannot_be_told_is_refused_by_its_name(callback, key, sentence):
    with pytest.raises(ConfigError) as caught:
        sort_callbacks([callback])
    assert_refused(caught, 2, key)
    sentence(caught)


def test_what_a_callback_asks_for_beside_the_end_is_said(capsys):
    class Saves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = True

    got = CallbackEvents([Saves()], RLOOConfig("out"), transformers.TrainerState())
    got.on_step(1, {"updates": 1})
    got.on_step(2, {"updates": 2})
    assert capsys.readouterr().out.count("control.should_save") == 1 and not got.wants_end()
    assert isinstance(got, Events)
    assert sort_callbacks([EarlyStoppingCallback(2), got])[0] == [got]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"reward_processing_classes": [None, None]}, "reward_funcs"),
        ({"settings": {"reward_weights": [0.5, 0.5]}}, "reward_weights"),
        ({"settings": {"max_steps": 2, "warmup_steps": 9}}, "train.warmup_steps"),
        ({"settings": {"output_dir": "a", "num_generations": 3}}, "K = 3"),
    ],
)
def test_what_a_run_would_refuse_is_refused_when_the_trainer_is_made(given, key, model):
    with pytest.raises(ConfigError) as caught:
        trainer_of(model, **given)
    assert_refused(caught, 2, key)
    if key.startswith("reward_"):  # a script may catch what TRL raises there
        assert isinstance(caught.value, ValueError)


def test_a_tokenizer_of_a_reward_model_that_has_a_name_is_kept(model):
    reward = str(synthetic.resolve_model_path("make:tiny_reward"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(reward)
    args = RLOOConfig("out", **SMALL)
    trainer = RLOOTrainer(model, reward, args, ROWS, reward_processing_classes=tokenizer)
    [entry] = trl.compose_run(trainer.recipe)[1].rewards.values()
    assert (Path(entry.tokenizer) / "tokenizer.json").is_file()


def test_a_mixture_of_experts_is_trained_once_its_router_has_no_loss(model):
    vocabulary = {"vocab_size": json.loads(Path(model, "config.json").read_text())["vocab_size"]}
    config = transformers.Qwen3MoeConfig(**HEADS | vocabulary, **EXPERTS)
    folder = Path("experts")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    with pytest.raises(ConfigError, match="mixture of experts") as error:
        trainer_of(str(folder))
    assert "router_aux_loss_coef=0.0" in error.value.problems[0].fix
    settings = {"router_aux_loss_coef": 0.0, "max_steps": 1}
    assert trainer_of(str(folder), settings=settings).train().global_step == 1


@pytest.mark.parametrize("kind", ["rloo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_script_of_trl_runs_whole_with_its_imports_changed(kind, model, monkeypatch):
    pytest.importorskip("trl", minversion="1.16")
    spec = find_spec("trl.scripts")
    text = Path(spec.submodule_search_locations[0], f"{kind}.py").read_text()
    Path("script.py").write_text(text.replace("from trl import", "from rloo_cli.compat.trl import"))
    Path("data").mkdir()
    rows = [{"prompt": [{"role": "user", "content": f"Say {n}"}]} for n in range(8)]
    for split in ("train", "test"):
        ROWS.from_list(rows).to_json(f"data/{split}.jsonl")
    words = f"--model_name_or_path {model} --dataset_name data --output_dir out --max_steps 1"
    words += " --reward_funcs think_format_reward --per_device_train_batch_size 8"
    words += " --max_completion_length 6 --eval_strategy steps --eval_steps 1 --report_to none"
    monkeypatch.setattr(sys, "argv", ["script.py", *words.split()])
    runpy.run_path("script.py", run_name="__main__")
    assert transformers.AutoModelForCausalLM.from_pretrained("out").num_parameters()


def test_the_card_names_the_data_that_push_to_hub_was_told(model, monkeypatch, capsys):
    trainer = trainer_of(model, settings={"max_steps": 1, "hub_model_id": "org/name"})
    trainer.train()
    asked = []

    class Told:
        returncode, stdout = 0, "https://hub/org/name\n"

    monkeypatch.setattr(trl.subprocess, "run", lambda words, **k: asked.append(words) or Told())
    trainer.push_to_hub(dataset_name="trl-lib/tldr", tags=["a"])
    assert "note: tags=['a']" in capsys.readouterr().out
    assert push.run([*asked[0][4:], "--dry-run"]) == 0
    assert "trl-lib/tldr" in capsys.readouterr().out and trainer.hub_model_id == "org/name"


@pytest.mark.slow
def test_two_processes_of_accelerate_launch_train_what_one_trains(model, tmp_path):
    Path("script.py").write_text(TWO_RANKS)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    # Without GPUs accelerate starts one process unless it is told this.
    words = [*launch, "--multi_gpu", "--main_process_port", "0", "script.py", model, "two", "4"]
    two = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert two.returncode == 0, two.stderr[-3000:]
    assert two.stdout.count("ranks: 2") == 1
    run = json.loads(Path("two/run.json").read_text())
    assert (run["state"], run["forward"]["ranks"], run["forward"]["engine"]) == (
        "finished", 2, "ddp"
    )  # fmt: skip
    one = [sys.executable, "script.py", model, "one", "8"]
    assert subprocess.run(one, env=env, capture_output=True, timeout=300).returncode == 0
    weights = [load_file(f"{name}_saved/model.safetensors") for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], atol=1e-5, rtol=1e-4)


def test_ranks_of_another_launcher_need_the_address_of_a_server(model):
    words = ["generation=vllm_server", f"model.path={model}"]
    _, settings = api.compose_run("smoke", overrides=words)
    with pytest.raises(ConfigError, match="without base_url"):
        api._no_server_of_its_own(settings.generation)
    server = "generation.server.base_url=http://127.0.0.1:9"
    own = api.compose_run("smoke", overrides=[*words, server])[1]
    api._no_server_of_its_own(own.generation)


@pytest.mark.slow
def test_an_error_on_one_rank_ends_both(model):
    text = TWO_RANKS.replace("return [", "raise ValueError('mine'); return [")
    Path("script.py").write_text(text)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    words = [*launch, "--multi_gpu", "--main_process_port", "0", "script.py", model, "two", "4"]
    two = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert two.returncode != 0 and "ValueError: mine" in two.stderr + two.stdout
    assert not Path("two/final").exists()


def test_another_name_of_trl_comes_from_trl_and_is_missing_without_it(monkeypatch):
    pytest.importorskip("trl")
    from trl import ModelConfig  # lazy: an optional package

    assert trl.ModelConfig is ModelConfig
    monkeypatch.setattr(trl, "find_spec", lambda name: None)
    with pytest.raises(AttributeError, match="pip install trl"):
        _ = trl.TrlParser
    assert issubclass(GRPOTrainer, RLOOTrainer)
