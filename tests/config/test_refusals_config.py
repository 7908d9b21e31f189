"""The scorecard's refusals of configs and command lines (BC), and others in their spirit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from assert_refused import assert_refused, printed_problems
from refusal_cases import MINE, SMOKE, Answer, Case, ask, is_clean, recipe, train
from transformers import SchedulerType

from rloo_cli.config import rules, synthetic
from rloo_cli.data.synthetic import addition, tiny, tldr, tool_model, vision_model
from rloo_cli.planning import model_spec

pytestmark = pytest.mark.process

RANKS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1"}
FUNCTION = "reward=function"

SCORECARD: dict[str, Case] = {
    "BC-1 a key with a slip": train(
        "algorithm.num_generation=8", fix="algorithm.num_generations", rule=True
    ),
    "BC-2 a key that is added": train("+algorithm.betta=3", fix="mean algorithm.beta?"),
    "BC-3 a recipe with a slip": Case(["train", "+recipe=tldr_1B"], "tldr_1B", fix="tldr_1b"),
    "a key of an agent that is not there": train("agent.max_turns=3", rule=True),
    "an agent that is gone": train("agent=openenv", key="'openenv'", fix="agent=class"),
    "the kind of an agent that is gone": train(
        "agent.kind=verifiers", key="agent.kind", fix="agent.lifetime=run"
    ),
    "BC-5 a key as a flag": train(
        "--algorithm.beta=0.1", key="--algorithm.beta", fix="algorithm.beta=0.1", rule=True
    ),
    "BC-6 a word for a number": train("algorithm.beta=abc", fix="beta=0.05", rule=True),
    "BC-7 nan": train("algorithm.beta=nan", key="got nan", fix="beta=0.05", rule=True),
    "BC-7 inf": train("algorithm.beta=inf", key="got inf"),
    "BC-7 negative": train("algorithm.beta=-0.1", key="got -0.1", rule=True),
    "BC-8 one completion": train("algorithm.num_generations=1", fix="=4", rule=True),
    "BC-9 prompts that do not divide": train(
        "train.prompts_per_step=5", "algorithm.num_minibatches=2",
        fix="train.prompts_per_step=4 or 6", rule=True,
    ),
    "BC-10 no room for a completion": train(
        "generation.max_completion_length=0", key="got 0", fix="max_completion_length=16"
    ),
    "BC-10 beyond the model": train(
        "generation.max_completion_length=5000", key="5001", fix="=1024", rule=True
    ),
    "BC-11 prompt and completion": train(
        "data.max_prompt_length=2040", key="2056", fix="data.max_prompt_length=2032", rule=True
    ),
    "BC-12 a filter and a correction": train(
        "generation.top_p=0.9", "algorithm.correction.mode=truncate",
        fix="generation.top_p=1.0, or algorithm.correction.mode=none", rule=True,
    ),
    "BC-13 weights as a list": train("reward_weights=[1,2]", fix="reward.NAME.weight"),
    "BC-14 rloo_k": train("rloo_k=1", fix="algorithm.num_generations", rule=True),
    "BC-14 kl_coef": train("kl_coef=1", fix="algorithm.beta"),
    "BC-14 cliprange": train("cliprange=1", fix="algorithm.epsilon"),
    "BC-14 num_ppo_epochs": train("num_ppo_epochs=1", fix="algorithm.num_iterations"),
    "BC-14 response_length": train("response_length=1", fix="generation.max_completion_length"),
    "BC-14 in a section": train("algorithm.rloo_k=4", fix="algorithm.num_generations"),
    "BC-16 a token": train(
        "+hf_token=hf_abcdefghijklmnopqrstuvwxyz", fix="export HF_TOKEN", rule=True
    ),
    "BC-17 a key that is not there": train(
        "root=${algoritm.beta}", "name=${root}", fix="${algorithm.beta}", rule=True
    ),
    "BC-17 a variable that is not set": train(
        "name=${oc.env:NOT_SET_IN_ANY_SHELL}", fix="export NOT_SET_IN_ANY_SHELL=", rule=True
    ),
    "BC-17 a circle": train("root=${name}", "name=${root}", fix="name, root", rule=True),
    "BC-21 a backend that is not there": train(
        "generation=vllm_serve", fix="generation=vllm_server", rule=True
    ),
    "BC-22 flash-attn": train(
        "model.attn_implementation=flash_attention_2",
        code=3, fix="pip install flash-attn", rule=True,
    ),
    "an engine that is not there": train("distributed.engine=deepspeed", key="zero2", rule=True),
    "BC-9 fewer prompts than processes": train(
        "distributed=ddp", "distributed.num_processes=4", "distributed.num_nodes=3",
        "train.prompts_per_step=8", fix="train.prompts_per_step=12", rule=True,
    ),
    "several processes of a single one": train(
        "distributed.num_processes=2", fix="distributed=ddp", rule=True
    ),
    "several nodes of a single process": train("distributed.num_nodes=2", fix="distributed=ddp"),
    "an optimizer kept where ddp has none": train(
        "distributed=ddp", "distributed.offload=optimizer", fix="distributed=zero3", rule=True
    ),
    "weights kept where zero2 has none": train(
        "distributed=zero2", "distributed.offload=parameters", fix="distributed=fsdp2"
    ),
    "quantized weights in shards": train(
        "distributed=fsdp2", "lora=default", "quantization=4bit",
        key="model.quantization", fix="distributed=ddp",
    ),
    "a moving reference in shards": train(
        "distributed=zero3", "model.ref_sync.every=5", fix="distributed=zero2", rule=True
    ),
    "a trainer that cuts sequences": train("distributed.context_parallel_size=2", rule=True),
    "a meeting place that is none": train(
        "distributed=ddp", "distributed.rdzv=node1:x", fix="HOST:29500", rule=True
    ),
    "nodes that nothing starts": train(
        "distributed=ddp", "distributed.num_processes=1", "distributed.num_nodes=2",
        fix="srun --nodes=2", rule=True,
    ),
    "a step of another number of nodes": train(
        "distributed=ddp", "distributed.num_processes=1", "distributed.num_nodes=2",
        env={"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"},
        fix="distributed.num_nodes=3, or srun --nodes=2", rule=True,
    ),
    "torchrun's processes for a single one": train(
        env=RANKS | {"WORLD_SIZE": "2"}, key="distributed.engine", fix="distributed=ddp"
    ),
    "more of torchrun's processes than prompts": train(
        "distributed=ddp", "train.prompts_per_step=2",
        env=RANKS | {"WORLD_SIZE": "3"}, fix="train.prompts_per_step=3",
    ),
    "a rank without a meeting place": train(
        "distributed=ddp", env={"RANK": "0", "WORLD_SIZE": "2"},
        key="MASTER_ADDR", fix="unset RANK WORLD_SIZE", rule=True,
    ),
    "BM-1 a folder that is not there": train("model.path=./nothing", rule=True),
    "BM-1 a name that is not cached": train(
        "model.path=org/nothing", env={"HF_HOME": "HERE/home"},
        code=3, fix="rloo fetch +recipe=smoke model.path=org/nothing", rule=True,
    ),
    "BR-1 a reward with a slip": train("reward=accuracyy", fix="reward=accuracy"),
    "BR-2 no file": train(FUNCTION, "reward.function.path=no.py:f", key="no.py", rule=True),
    "BR-2 no Python": train(
        FUNCTION, "reward.function.path=a.py:f",
        files={"a.py": "x = 1\ndef f(:\n"}, where="a.py:2", rule=True,
    ),
    "BR-2 no such function": train(
        FUNCTION, "reward.function.path=a.py:scor",
        files={"a.py": "def score(completions): ...\n"}, fix="a.py:score", rule=True,
    ),
    "BR-2 Python's own": train(
        FUNCTION, "reward.function.kwargs={command: touch pwned}",
        "reward.function.path=os:system", fix="reward.function.path=file.py:name", rule=True,
    ),
}  # fmt: skip

# What a clumsy hand writes.
WORDS: dict[str, Case] = {
    "nothing": train("", fix="key=VALUE", rule=True),
    "an equals sign": train("=", key="before", fix="key=VALUE", rule=True),
    "a flag of Hydra's that is not ours": train("--hydra-help"),
    "a package": train("model@x=tiny", key="cannot contain @", rule=True),
    "a letter that is none": train("ålgorithm.beta=1", fix="plain letters", rule=True),
    "text without quotes": train("data.system=Ünï", fix="'data.system=\"Ünï\"'"),
    "a line's end": train("name=a\nb", fix='"a\\nb"'),
    "a number of 5000 digits": train("max_steps=" + "9" * 5000, key="4300 digits"),
    "a number beyond 64 bits": train("max_steps=" + "9" * 30, rule=True),
    "a seed beyond 32 bits": train("seed=4294967296", fix="seed=1", rule=True),
    "a float for an integer": train("max_steps=1e3", key="got 1000.0", rule=True),
    "true for a number": train("seed=true", key="got True"),
    "a list for a number": train("algorithm.beta=[1]", key="got [1]"),
    "a number for a section": train("train=5", fix="train.KEY=VALUE"),
    "null for a section": train("eval=null", fix="eval.KEY=VALUE"),
    "null for the rewards' defaults": train(
        "reward_defaults=null", fix="reward_defaults.KEY=VALUE", rule=True
    ),
    "keys for a choice": train("model={path: x}", fix="model.KEY=VALUE", rule=True),
    "no choice": train("algorithm=null", where="command line", fix="algorithm=CHOICE"),
    "two recipes": train("+recipe=quickstart", rule=True),
    "a list of recipes": train("+recipe=[smoke]", fix="+recipe=smoke"),
    "a depth without end": train(
        "train.optimizer_kwargs=" + "{a:" * 300 + "1" + "}" * 300, key="", rule=True
    ),
    "an absolute name": train("name=/tmp/x", key="/tmp/x", fix="name=smoke", rule=True),
    "a name that climbs": train("name=..", fix="name=smoke"),
    "a name that is long": train("name=" + "a" * 200, key="150"),
    "no root": train("root=", key="root = ''"),
    "a root that is long": train("root=" + "a" * 900, fix="root=runs"),
    "a root that is a file": train("root=afile", fix="root=runs", rule=True),
    "a root under a file": train("root=afile/x", key="afile", fix="root=runs"),
    "no model": train("model.path=", fix="model.path=make:tiny"),
    "null for a model": train("model.path=null", key="got None", fix="model.path=make:tiny"),
    "a name with a blank": train("model.path='a b'", fix="model.path=ORG/NAME", rule=True),
    "a folder without a model": train("model.path=..", key="no config.json", rule=True),
    "a file for a model": train("model.path=./afile", key="is a file", rule=True),
    "a tokenizer that is not there": train("model.tokenizer=./no", fix="model.tokenizer=ORG/NAME"),
    "no revision": train("model.revision=", fix="model.revision=TEXT"),
    "a template that is a folder": train("model.chat_template=.", fix="=null", rule=True),
    "no data": train("data.path=", fix="data.path=make:tiny"),
    "data that is a device": train("data.path=/dev/zero", fix="data.path=ORG/NAME", rule=True),
    "no split": train("data.split=", fix="data.split=train"),
    "a stop that is empty": train("generation.stop=['']", key="generation.stop.0", rule=True),
    "a token below 0": train("generation.stop_token_ids=[-1]", key="got -1"),
    "a least above the most": train("generation.min_tokens=17", fix="=16", rule=True),
    "an optimizer that is none": train("train.optimizer=adam", fix="=adamw", rule=True),
    "Python's own optimizer": train("train.optimizer=os:system", fix="file.py:name"),
    "a schedule that is none": train("train.lr_scheduler=linar", fix="lr_scheduler=linear"),
    "a rate that is 0 for a computer": train("train.learning_rate=1e-400", key="0", rule=True),
    "one in a list": train(
        "train.optimizer_kwargs={betas:[1e-400,0.9]}", key="train.optimizer_kwargs.betas.0"
    ),
    "a rate that no run survives": train("train.learning_rate=1e6", fix="=1e-06", rule=True),
    "sft's rate": train("sft.learning_rate=11", fix="sft.learning_rate=1e-05"),
    "a reward model's": train("reward_model.learning_rate=11", fix="learning_rate=1e-05"),
    "a stop that is no text": train("generation.stop=[false]", key="False", fix='["false"]'),
    "a stop that is a number": train("generation.stop=[5]", fix='["5"]', rule=True),
    "a key that no sweeper has": train("hydra.sweeper.x=1", key="params", rule=True),
    "one that is near": train("hydra.sweeper.max_batch=1", fix="hydra.sweeper.max_batch_size"),
    "a key that no launcher has": train("hydra.launcher.x=1", rule=True),
    "a deadline without end": train("reward.length_tokens.timeout_s=1e20", fix="=120.0"),
    "a reward's key for all": train(
        "reward_defaults.foo=1", key="reward.unique_chars.foo", where="reward_defaults.foo=1"
    ),
    "a flag without its dash": train("--dryrun", fix="--dry-run"),
    "a key alone": train("algorithm.beta", fix="algorithm.beta=VALUE"),
    "no number": train("algorithm.beta=", key="got ''", fix="algorithm.beta=0.05"),
    "a comma for a point": train("algorithm.beta=0,1", where="algorithm.beta=0,1", rule=True),
    "half a prompt": train("train.prompts_per_step=2.5", key="got 2.5"),
    "another's name of a dtype": train("model.dtype=fp16", key="'float16'"),
    "a micro-batch without whole groups": train("train.micro_batch_size=6", fix="=4", rule=True),
    "no length": train("max_steps=null", rule=True),
    "two lengths": train("total_episodes=10", fix="total_episodes=null", rule=True),
    "a reward's name with a slip": train(
        "reward=[length_tokens,lenght_chars]", key="lenght_chars", fix="length_chars"
    ),
    "null for the rewards": train("reward=null", fix="reward=accuracy", rule=True),
    "no reward": train("reward=[]", fix="reward=accuracy"),
    "null for a choice": train("model=null"),
    "an algorithm that is none": train("algorithm=rlo", fix="algorithm=rloo"),
    "a debug choice that is none": train("+debug=gpu", key="cpu"),
    "a made model that is none": train("model.path=make:adition", fix="=make:addition", rule=True),
    "data that is not there": train("data.path=nothing.jsonl", rule=True),
    "an open bracket": train("model.path=[", where="model.path=["),
    "what is not there, left out": train("~nothing", where="~nothing", rule=True),
    "what a run needs, left out": train("~algorithm.beta", key="algorithm.beta", rule=True),
    "a threadbare machine": train("distributed.threads=100000", fix="distributed.threads=4096"),
}
LAST = "my.yaml:6"  # the line that a case adds to MINE
CHOICES = {"key": "defaults", "where": "my.yaml:1", "fix": "defaults: [override /model: tiny]"}
RECIPES: dict[str, Case] = {
    "text": recipe("hello\n", "my.yaml", where="my.yaml", fix="key: value", rule=True),
    "a tab": recipe("a:\n\tb: 1\n", "my.yaml", where="my.yaml:2", fix="line 2", rule=True),
    "a key twice": recipe(MINE + "seed: 1\nseed: 2\n", "seed", where="my.yaml:7", rule=True),
    "a NUL": recipe(MINE + "name: a\0b\n", "#x0000", where="my.yaml"),
    "a key that is null": recipe(MINE + "null: 2\n", "key type", where="my.yaml"),
    "a key with dots": recipe(
        MINE + "algorithm.beta: 0.3\n", "algorithm.beta",
        where=LAST, fix="algorithm: {beta: VALUE}", rule=True,
    ),
    "10 MB": recipe(MINE + "#" * 10**7, "kB", where="my.yaml", rule=True),
    "10,000 keys": recipe(
        "".join(f"k{i}: 1\n" for i in range(10**4)), "values", where="my.yaml", rule=True
    ),
    "200 levels": recipe(
        MINE + "x: " + "{a: " * 200 + "1" + "}" * 200, "30", where=LAST, rule=True
    ),
    "a long value": recipe(MINE + f"seed: {'a' * 10**5}\n", "seed", where=LAST, fix="seed=1"),
    "no list of defaults": recipe("defaults: tiny\n", **CHOICES, rule=True),
    "null for defaults": recipe("defaults: null\n", **CHOICES),
    "a list in defaults": recipe("defaults: [[a]]\n", **CHOICES),
    "no override": recipe(
        MINE.replace("override ", ""), "Multiple values", where="my.yaml", rule=True
    ),
    "itself": recipe("defaults: [my]\n", "recipe/my", fix="+recipe=my.yaml"),
    "a section that is text": recipe(MINE + "algorithm: x\n", "algorithm", where=LAST, fix="KEY"),
    "a list of rewards": recipe(
        MINE + "reward: [accuracy]\n", "reward",
        where=LAST, fix="defaults: [override /reward: [accuracy]]", rule=True,
    ),
    "a reward that is text": recipe(
        MINE + "reward: {x: accuracy}\n", "reward", where=LAST, fix="[override /reward: NAME]"
    ),
    "a reward's type that is a list": recipe(
        MINE + "reward: {b: {type: [x]}}\n", "reward.b.type", where=LAST
    ),
    "an algorithm that is a list": recipe(
        MINE + "algorithm: {name: [x]}\n", "algorithm.name", where=LAST
    ),
    "a reward named with dots": recipe(
        MINE + "reward: {a.b: {type: length_chars}}\n", "reward.a.b", where=LAST, rule=True
    ),
    "a reward named as what pydantic has": recipe(
        MINE + "reward: {model_fields: {type: length_chars}}\n", "reward.model_fields", where=LAST
    ),
    "a root with a line's end": recipe(
        MINE + 'root: "a\\nb"\n', r"a\nb", where=LAST, fix="root=runs"
    ),
    "a folder": Case(
        ["train", "+recipe=d.yaml"], "d.yaml", "d.yaml", files={"d.yaml/x": ""}, rule=True
    ),
    "an address": Case(["train", "+recipe=https://x.y/z.yaml"], "https:/x.y/z.yaml"),
    "a rate that is 0 for a computer": recipe(
        MINE + "train:\n  learning_rate: 1e-400\n", "train.learning_rate", where="my.yaml:7"
    ),
    "one in a list": recipe(
        MINE + "train: {optimizer_kwargs: {betas: [1.0e-400, 0.9]}}\n",
        "train.optimizer_kwargs.betas.0", where=LAST,
    ),
    "a word that YAML reads as false": recipe(
        MINE + "generation:\n  stop: [no]\n",
        "generation.stop.0", where="my.yaml:7", fix='stop: ["no"]', rule=True,
    ),
}  # fmt: skip
MODELS = {
    "no JSON": ("{", "m/config.json"),
    "a list": ("[1]", "mapping"),
    "endless": ("[" * 100_000, "m/config.json"),
    "many": ('{"max_position_embeddings": "many", "text_config": 3}', "many"),
    "below 0": ('{"max_position_embeddings": -5}', "-5"),
    "beyond floats": ('{"max_position_embeddings": 1e999}', "inf"),
    "huge": ('{"max_position_embeddings": 99999999999}', "99999999999"),
    "small": ('{"max_position_embeddings": 1}', "17"),
}
OWN = "own/model/a.yaml"
DIRS = {
    "a list": (OWN, "[1]\n", {"where": OWN, "fix": "key: value"}),
    "itself": (OWN, "defaults: [a]\n", {"key": "", "fix": "defaults"}),
    "what is not there": (OWN, "defaults: [nope]\n", {"key": "model/nope", "fix": "model=a"}),
    "a shipped name": (
        "own/model/tiny.yaml", "path: x\n", {"fix": "own/model/my_tiny.yaml", "rule": True}
    ),
    "a shipped recipe's name": (
        "own/recipes/smoke.yaml", "seed: 1\n", {"fix": "own/recipes/my_smoke.yaml"}
    ),
}  # fmt: skip
# Words that somebody writes on the first day, what else is in the folder, and what they are told.
FIRST: dict[str, tuple[list[str], str]] = {
    "a recipe's file as it is": (["my.yaml"], "+recipe=my.yaml"),
    "a recipe's name as it is": (["quickstart"], "+recipe=quickstart"),
    "a flag for it": (["--config", "my.yaml"], "+recipe=my.yaml"),
    "a flag for it with =": (["--config=my.yaml"], "+recipe=my.yaml"),
    "a flag for a recipe of ours": (["--recipe", "smoke"], "+recipe=smoke"),
    "a recipe's file without its end": (["+recipe=my"], "+recipe=my.yaml"),
    "a flag with _": ([SMOKE, "--dry_run"], "--dry-run"),
    "a flag with one dash": ([SMOKE, "-dry-run"], "--dry-run"),
    "another trainer's flag": ([SMOKE, "--learning_rate", "1e-6"], "train.learning_rate=1e-6"),
    "a model of the hub": ([SMOKE, "model=org/name"], "model.path=org/name"),
    "one without /": ([SMOKE, "model=gpt2"], "model.path=gpt2"),
    "a near model": ([SMOKE, "model=tny"], "model=tiny"),
    "data of the hub": ([SMOKE, "data=org/name"], "data.path=org/name"),
    "data in a file": ([SMOKE, "data=rows.jsonl"], "data.path=rows.jsonl"),
    "a reward in a file": (
        [SMOKE, "reward=my.py:f"], "reward=function reward.function.path=my.py:f"
    ),
    "a reward in a file among others": (
        [SMOKE, "reward=[accuracy,my.py:f]"],
        "reward=[accuracy,function] reward.function.path=my.py:f",
    ),
    "a reward model": ([SMOKE, "reward=org/rm"], "reward=model reward.model.path=org/rm"),
    "an algorithm in a file": ([SMOKE, "algorithm=my.py"], "algorithm.name=my.py"),
    "a key of an adapter alone": ([SMOKE, "model.lora.r=8"], "lora=default"),
    "PPO's key without PPO": ([SMOKE, "algorithm.vf_coef=0.1"], "algorithm=ppo, or"),
    "what there is nothing for": ([SMOKE, "data_collator=x"], "data_collator"),
}  # fmt: skip
MISSPELT = {  # a key without which nothing runs: its misspelling is named, not what it lacks
    "on the command line": train("model=default", "model.pth=x", fix="model.path=x", rule=True),
    "at the top": train("model=default", "model_path=x", fix="model.path=x"),
    "in a section that is none": train("model=default", "modle.path=x", fix="model.path=x"),
    "in a recipe": recipe(
        MINE.replace("model: tiny", "model: default") + "model:\n  pth: x\n",
        "model.pth", where="my.yaml:7", fix="model.path=x",
    ),
    "of a reward": train(FUNCTION, "reward.function.pth=my.py:f", fix="function.path=my.py:f"),
}  # fmt: skip
CASES = SCORECARD | {
    f"word: {name}": replace(case, files={"afile": ""}) for name, case in WORDS.items()
}
CASES |= {f"recipe: {name}": case for name, case in RECIPES.items()}
CASES |= {
    f"config.json: {name}": train("model.path=m", files={"m/config.json": text}, key=key)
    for name, (text, key) in MODELS.items()
}
CASES |= {
    f"config-dir: {name}": train(
        "--config-dir=own", "model=a", files={path: text}, **({"key": path} | named)
    )
    for name, (path, text, named) in DIRS.items()
}
CASES |= {
    f"first: {name}": Case(["train", *words], fix=fix, files={"my.yaml": MINE})
    for name, (words, fix) in FIRST.items()
}
CASES |= {f"misspelt: {name}": case for name, case in MISSPELT.items()}
CASES |= {
    "a sweep's key that its launcher lacks": train(
        "--multirun", "seed=1,2", "hydra/launcher=submitit_slurm", "hydra.launcher.partiton=x",
        fix="hydra.launcher.partition?",
    ),
    "one that joblib lacks": train(
        "-m", "hydra/launcher=joblib", "hydra.launcher.jobs=2", fix="hydra.launcher.n_jobs?"
    ),
    "config-dir: not there": train("--config-dir", "nowhere", key="nowhere", rule=True),
    "config-dir: a reward's list": train("reward={unique_chars: 3}", fix="reward.KEY=VALUE"),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    return ask(CASES, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_cleanly_with_a_reason(
    name: str, answers: dict[str, Answer], sentence: Callable[..., None]
) -> None:
    is_clean(CASES[name], answers[name], sentence)


def test_a_misspelt_key_that_nothing_runs_without_is_one_story(answers: dict[str, Answer]) -> None:
    for name in MISSPELT:
        assert len(printed_problems(answers[f"misspelt: {name}"].err)) == 1, name


def test_bc_4_a_recipe_needs_no_plus(tmp_path: Path) -> None:
    dry = {n: Case(["train", n, "--dry-run"]) for n in ("recipe=smoke", "+recipe=smoke")}
    found = ask(dry, tmp_path, opens_data=True)
    assert found["recipe=smoke"].code == 0
    assert found["recipe=smoke"].out == found["+recipe=smoke"].out


def test_what_is_unusual_and_right_is_taken(tmp_path: Path) -> None:
    own = {
        "o wn/model/a.yaml": "defaults: [default, _self_]\npath: make:tiny\nref_path: make:tiny\n"
    }
    own |= {"it's/data/b.yaml": "defaults: [tiny, _self_]\nmax_prompt_length: 7\n"}
    dirs = ["--config-dir", "o wn", "--config-dir=it's"]
    taken = {
        "a BOM": recipe("\ufeff" + MINE),
        "CRLF": recipe(MINE.replace("\n", "\r\n")),
        "a recipe on top of another": recipe("defaults: [smoke]\nseed: 5\n"),
        "a blank in its name": Case(["train", "+recipe=a b.yaml"], files={"a b.yaml": MINE}),
        "quotes": train("data.template='\"Ünï: {prompt}\"'"),
        "0 for a rate": train("train.learning_rate=0"),
        "0 with an exponent": train("train.learning_rate=0.0e-9"),
        "a text like a number": train("data.template='\"{prompt} 1e-400\"'", "algorithm.beta=0.0"),
        "a word that is no in YAML 1.1": train("generation.stop=[no]"),
        "a key of a launcher": train(
            "hydra/launcher=submitit_slurm",
            "hydra.launcher.timeout_min=720",
            "+hydra.launcher.additional_parameters.reservation=x",
        ),
        "folders of one's own": train(*dirs, "model=a", "data=b", files=own),
    }
    found = ask(
        {n: Case([*c.words, "--dry-run"], files=c.files) for n, c in taken.items()},
        tmp_path,
        opens_data=True,
    )
    assert {n: a.err for n, a in found.items() if a.code} == {}
    assert "max_prompt_length: 7" in found["folders of one's own"].out


def test_a_config_dir_is_known_to_the_other_verbs_too(tmp_path: Path) -> None:
    own = {"own/model/a.yaml": "defaults: [default, _self_]\npath: make:tiny\ndtype: float16\n"}
    words = ["config", "explain", "model.dtype", "+recipe=smoke", "model=a", "--config-dir", "own"]
    found = ask({"explain": Case(words, files=own)}, tmp_path)["explain"]
    assert found.code == 0, found.err
    assert '"float16"' in found.out and "own/model/a.yaml:3" in found.out


def test_the_fix_is_the_recipes_value_not_confs(tmp_path: Path) -> None:
    cases = {
        "above a recipe": Case(["train", "+recipe=quickstart", "algorithm.beta=abc"]),
        "in a recipe": recipe(MINE + "algorithm: {beta: abc}\n"),
        "above no recipe's": Case(["train", "+recipe=quickstart", "seed=abc"]),
    }
    found = ask(cases, tmp_path)
    for answer, fix in zip(found.values(), ("=0.01", "=0.05", "seed=1"), strict=True):
        assert_refused(answer, fix=fix)


def test_what_is_known_without_torch_is_what_the_libraries_say() -> None:
    assert set(rules.LR_SCHEDULES) == {s.value for s in SchedulerType}
    shapes = {"tiny": tiny.SHAPE, "tiny_reward": tiny.SHAPE, "addition": addition.SHAPE}
    shapes |= dict.fromkeys(("tldr_base", "tldr_sft", "tldr_reward"), tldr.SHAPE)
    shapes["addition_shallow"] = addition.SHAPE
    shapes |= dict.fromkeys(
        ("smollm2", "smollm2_shallow"), model_spec.model_config_values("make:smollm2")
    )
    shapes |= dict.fromkeys(("products", "game"), tool_model.SHAPE)
    shapes["vision"] = vision_model.TEXT_SHAPE
    assert {
        n: s["max_position_embeddings"] for n, s in shapes.items()
    } == synthetic.SYNTHETIC_CONTEXT_LENGTHS
