"""TRL's scripts with one changed import line: their recipes, and that they train."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import reward_model_cases
import transformers
import yaml
from assert_refused import assert_refused
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rloo_cli import api
from rloo_cli.compat import trl
from rloo_cli.compat.trl import RLOOConfig, RLOOTrainer
from rloo_cli.config import check, synthetic
from rloo_cli.config.compose import compose_config
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

SCRIPTS = yaml.safe_load((Path(__file__).parent / "trl_scripts.yaml").read_text())
NAMES = [script["is"] for script in SCRIPTS]
ROWS = {
    "text": [{"prompt": f"Say {n}: "} for n in range(16)],
    "chat": [{"prompt": [{"role": "user", "content": f"Say {n}"}]} for n in range(16)],
    "math": [
        {"prompt": [{"role": "user", "content": f"{n} + 1"}], "solution": f"${n + 1}$"}
        for n in range(16)
    ],
    "own": [],
}
SMALL = (
    "max_steps=1", "total_episodes=null", "train.epochs=null", "train.prompts_per_step=2",
    "algorithm.num_generations=2", "generation.max_completion_length=6",
    "train.micro_batch_size=null", "logging.console=plain", "distributed.threads=1",
    "data.max_prompt_length=null",
)  # fmt: skip


def dotted(values: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    return None if values == {} else values


def reward_model(name: str) -> transformers.PreTrainedModel:
    model = transformers.Qwen3ForSequenceClassification(reward_model_cases.FAMILIES["qwen3"]())
    model.config._name_or_path = name
    return model


def loader(kind: Any, tiny: str) -> Any:
    """A from_pretrained for which every name of the hub is a tiny model."""
    load = kind.from_pretrained

    def loaded(name: str, *args: Any, **kwargs: Any) -> Any:
        if Path(name).is_dir():
            return load(name, *args, **kwargs)
        if kind is AutoModelForSequenceClassification:
            return reward_model(tiny)
        return load(tiny, *args, **kwargs)

    return loaded


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Names of models and data sets stand for tiny ones; -> a function that runs a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    tiny = synthetic.resolve_model_path("make:tiny")
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: Dataset.from_list(rows))
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", loader(kind, tiny))

    def run(script: dict[str, Any]) -> None:
        rows[:] = ROWS[script["data"]]
        text = script["text"].replace("from trl import", "from rloo_cli.compat.trl import")
        assert (
            sum(a != b for a, b in zip(text.split("\n"), script["text"].split("\n"), strict=True))
            == 1
        )
        Path("train.py").write_text(text)
        runpy.run_path("train.py", run_name="__main__")

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_script_of_trl_becomes_a_recipe_that_means_the_same(script, stand_ins, monkeypatch):
    monkeypatch.setattr("rloo_cli.config.compose.register_config_dirs", lambda folders: None)
    found = []

    def compose(recipe, rewards, overrides, replace_rewards, events):
        composed = compose_config([f"+recipe={recipe}", *overrides])
        found.append((check.check_config(api._with(composed, rewards)), recipe, rewards))
        Path("rloo_model/final").mkdir(parents=True, exist_ok=True)
        return {"updates": 0}

    monkeypatch.setattr(trl, "train", compose)
    stand_ins(script)
    [(settings, recipe, rewards)] = found
    written = yaml.safe_load(recipe.read_text())
    for key, value in script["recipe"].items():
        assert dotted(written, key) == value, key
    assert list(rewards) == script["rewards"]
    assert settings.algorithm.name == ("grpo" if "GRPO" in script["is"] else "rloo")
    assert (settings.agent is not None) == ("tools=" in script["text"])


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(s, id=s["is"], marks=() if "objects" in s["is"] else pytest.mark.slow)
        for s in SCRIPTS
        if "needs" not in s
    ],
)
def test_a_script_of_trl_trains(script, stand_ins, monkeypatch):
    tiny = synthetic.resolve_model_path("make:tiny")
    paths = {"RM_Mistral_7B", "reward_model_0"}

    def small(recipe, rewards, overrides, replace_rewards, events):
        written = yaml.safe_load(recipe.read_text())
        more = [
            f"reward.{n}.path=.inputs/out/reward_model_0" for n in written["reward"] if n in paths
        ]
        path = [f"model.path={tiny}"] if "/" in str(written["model"]["path"]) else []
        path = [] if "inputs" in str(written["model"]["path"]) else path
        words = [*overrides, *SMALL, *path, *more]
        return api.train(recipe, rewards, words, replace_rewards=replace_rewards, events=events)

    monkeypatch.setattr(trl, "train", small)
    stand_ins(script)
    [summary] = [json.loads(p.read_text()) for p in Path().glob("*/summary.json")]
    assert summary["updates"] == 1
    if "save_model" in script["text"]:
        assert {"config.json", "tokenizer.json"} <= {p.name for p in Path("rloo_final").iterdir()}


def test_a_setting_that_trl_has_not_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match="write num_generations"):
        RLOOConfig("out", num_generation=4)
    assert RLOOConfig("out", beta=0.1).beta == 0.1
    assert RLOOConfig("out").num_generations == 2


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"callbacks": [print]}, "callback"),
        ({"optimizers": (print, None)}, "optimizers"),
        ({"peft_config": object()}, "LoraConfig"),
        (
            {"train_dataset": IterableDataset.from_generator(lambda: iter([{"prompt": "a"}]))},
            "max_steps",
        ),
        ({"tools": [lambda a: a]}, "inside"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_have_to_be_ignored_is_refused(given, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        RLOOTrainer("a/b", print, RLOOConfig("out"), **given)
    assert_refused(caught, 2, key)
    assert not list(tmp_path.rglob("recipe.yaml"))


def test_a_stream_gives_the_rows_that_the_run_uses_and_held_out_sets_have_names(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    stream = IterableDataset.from_generator(lambda: ({"prompt": str(n)} for n in range(1000)))
    args = RLOOConfig("out", max_steps=3, per_device_train_batch_size=4, eval_strategy="steps")
    held_out = {"first": Dataset.from_list([{"prompt": "x"}])}
    trainer = RLOOTrainer("a/b", "c/d", args, stream, held_out)
    recipe = yaml.safe_load(trainer.recipe.read_text())
    assert len(Dataset.load_from_disk(recipe["data"]["path"])) == 12
    assert list(recipe["eval"]["sets"]) == ["first"]


def test_a_lora_config_becomes_the_adapter_of_the_recipe(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    trainer = RLOOTrainer("a/b", "c/d", RLOOConfig("out"), Dataset.from_list([{"prompt": "a"}]),
                          peft_config=config)  # fmt: skip
    lora = yaml.safe_load(trainer.recipe.read_text())["model"]["lora"]
    assert (lora["r"], lora["alpha"], lora["target_modules"]) == (4, 8.0, ["q_proj"])


def test_another_kind_of_adapter_becomes_its_kind_and_what_differs_from_its_defaults(
    tmp_path, monkeypatch
):
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    config = peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = RLOOTrainer("a/b", "c/d", RLOOConfig("out"), Dataset.from_list([{"prompt": "a"}]),
                          peft_config=config)  # fmt: skip
    lora = yaml.safe_load(trainer.recipe.read_text())["model"]["lora"]
    assert lora == {
        "peft_type": "OFT", "target_modules": ["q_proj"], "kwargs": {"oft_block_size": 8}
    }  # fmt: skip


def test_trls_own_config_is_taken_with_what_differs_from_its_defaults(tmp_path, monkeypatch):
    theirs = pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    args = theirs.RLOOConfig(
        "out", num_generations=4, learning_rate=3e-6, report_to="none", use_cpu=True
    )
    trainer = RLOOTrainer("a/b", "c/d", args, Dataset.from_list([{"prompt": "a"}]))
    recipe = yaml.safe_load(trainer.recipe.read_text())
    assert recipe["algorithm"]["num_generations"] == 4
    assert recipe["train"] | {"learning_rate": 3e-6, "prompts_per_step": 2} == recipe["train"]
    assert recipe["algorithm"]["num_minibatches"] == 1


def test_push_to_hub_is_the_verb_push_with_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = RLOOConfig("out", hub_model_id="org/name", hub_private_repo=True)
    trainer = RLOOTrainer("a/b", "c/d", args, Dataset.from_list([{"prompt": "a"}]))
    with pytest.raises(ConfigError, match=r"call train\(\)"):
        trainer.push_to_hub()
    Path("out/final").mkdir(parents=True)
    asked = []

    class Told:
        returncode, stdout = 0, "https://hub/org/name\n"

    monkeypatch.setattr(
        trl.subprocess, "run", lambda words, **k: asked.append((words, k)) or Told()
    )
    assert trainer.push_to_hub("done", token="t0ken", revision="b") == "https://hub/org/name"
    [(words, given)] = asked
    assert words[3:] == [
        "push",
        "out",
        "--repo",
        "org/name",
        "--message",
        "done",
        "--revision",
        "b",
    ]
    assert given["env"]["HF_TOKEN"] == "t0ken"


def test_trainer_state_has_every_field_of_transformers():
    theirs = {f.name for f in dataclasses.fields(transformers.TrainerState)}
    assert theirs <= {f.name for f in dataclasses.fields(TrainerState)}
