"""The scorecard's refusals of configs and command lines (BC), and others in their spirit."""

from pathlib import Path

import pytest
from refusal_cases import MINE, SMOKE, Answer, Case, ask, is_clean, recipe, train
from transformers import SchedulerType

from rloo_cli.config import rules, synthetic
from rloo_cli.data.synthetic import addition, tiny, tldr, tool_model, vision_model
from rloo_cli.planning import model_families

IMPORTANCE = "algorithm.correction.mode=truncate"
OLD = {
    "rloo_k": "algorithm.num_generations",
    "kl_coef": "algorithm.beta",
    "cliprange": "algorithm.epsilon",
    "num_ppo_epochs": "algorithm.num_iterations",
    "response_length": "generation.max_completion_length",
}

SCORECARD: dict[str, Case] = {
    "BC-1 a key with a slip": train(
        "algorithm.num_generation=8", says=["is not a key", "algorithm.num_generations"]
    ),
    "BC-2 a key that is added": train(
        "+algorithm.betta=3", says=["algorithm.betta is not a key", "mean algorithm.beta?"]
    ),
    "BC-3 a recipe with a slip": Case(
        ["train", "+recipe=tldr_1B"],
        ["no recipe 'tldr_1B'", "opd_addition, openenv_echo, ", "fix      +recipe=tldr_1b"],
    ),
    "a key of an agent that is not there": train(
        "agent.max_turns=3", says=["agent.max_turns is set, and there is no agent", "+debug=cpu"]
    ),
    "BC-5 a key as a flag": train("--algorithm.beta=0.1", says=["fix      algorithm.beta=0.1"]),
    "BC-6 a word for a number": train("algorithm.beta=abc", says=["valid number, got 'abc'"]),
    "BC-7 nan": train("algorithm.beta=nan", says=["finite number, got nan"]),
    "BC-7 inf": train("algorithm.beta=inf", says=["finite number, got inf"]),
    "BC-7 negative": train("algorithm.beta=-0.1", says=["greater than or equal to 0, got -0.1"]),
    "BC-8 one completion": train(
        "algorithm.num_generations=1",
        says=["greater than or equal to 2, got 1", "at least 2 for a leave-one-out"],
    ),
    "BC-9 prompts that do not divide": train(
        "train.prompts_per_step=5",
        "algorithm.num_minibatches=2",
        says=["5 = 2 * 2 + 1", "train.prompts_per_step=4 or 6"],
    ),
    "BC-10 no room for a completion": train(
        "generation.max_completion_length=0",
        says=["greater than or equal to 1, got 0", "fix      generation.max_completion_length=16"],
    ),
    "BC-10 beyond the model": train(
        "generation.max_completion_length=5000", says=["context of 2048 tokens", "5000 = 5001"]
    ),
    "BC-11 prompt and completion": train(
        "data.max_prompt_length=2040",
        says=["2040 + max_completion_length 16 = 2056", "data.max_prompt_length=2032"],
    ),
    "BC-12 a filter and a correction": train(
        "generation.top_p=0.9",
        IMPORTANCE,
        says=["generation.top_p=0.9", "generation.top_p=1.0, or algorithm.correction.mode=none"],
    ),
    "BC-13 weights as a list": train("reward_weights=[1,2]", says=["reward.<name>.weight"]),
    **{f"BC-14 {old}": train(f"{old}=1", says=[new]) for old, new in OLD.items()},
    "BC-16 a token": train(
        "+hf_token=hf_abcdefghijklmnopqrstuvwxyz", says=["looks like a secret", "export HF_TOKEN"]
    ),
    "BC-17 a key that is not there": train(
        "name=${root}", "root=${algoritm.beta}",
        says=["name = ${root}\n", "root = ${algoritm.beta}\n", "mean ${algorithm.beta}?"],
    ),
    "BC-17 a variable that is not set": train(
        "name=${oc.env:NOT_SET_IN_ANY_SHELL}", says=["NOT_SET_IN_ANY_SHELL", "export NOT_SET_IN"]
    ),
    "BC-17 a circle": train(
        "name=${root}", "root=${name}",
        says=["name = ${root}", "root = ${name}", "Recursive", "fix      a plain value for one"],
    ),
    "BC-21 a backend that is not there": train(
        "generation=vllm_serve", says=["no generation 'vllm_serve'", "generation=vllm_server"]
    ),
    "BC-22 flash-attn": train(
        "model.attn_implementation=flash_attention_2",
        code=3,
        says=["model.attn_implementation", "pip install flash-attn"],
    ),
    "an engine that is not there": train(
        "distributed.engine=deepspeed", says=["distributed.engine", "zero2"]
    ),
    "BC-9 fewer prompts than processes": train(
        "distributed=ddp", "distributed.num_processes=4", "distributed.num_nodes=3",
        "train.prompts_per_step=8",
        says=["8 is less than the 12 processes", "4 would have none", "prompts_per_step=12"],
    ),
    "several processes of a single one": train(
        "distributed.num_processes=2",
        says=["num_processes = 2, and distributed.engine = single", "distributed=ddp"],
    ),
    "several nodes of a single process": train(
        "distributed.num_nodes=2", says=["distributed.num_nodes = 2, and", "distributed=ddp"]
    ),
    "an optimizer kept where ddp has none": train(
        "distributed=ddp", "distributed.offload=optimizer",
        says=["engine = ddp; it needs one of: zero1, zero2, zero3", "fix      distributed=zero3"],
    ),
    "weights kept where zero2 has none": train(
        "distributed=zero2", "distributed.offload=parameters",
        says=["engine = zero2; it needs one of: zero3, fsdp2", "fix      distributed=fsdp2"],
    ),
    "quantised weights in shards": train(
        "distributed=fsdp2", "lora=default", "quantization=4bit",
        says=["model.quantization and distributed.engine = fsdp2 do not go", "distributed=ddp"],
    ),
    "a moving reference in shards": train(
        "distributed=zero3", "model.ref_sync.every=5", says=["model.ref_sync.every and", "zero2"]
    ),
    "a trainer that cuts sequences": train(
        "distributed.context_parallel_size=2", says=["a sequence is on one device"]
    ),
    "a meeting place that is none": train(
        "distributed=ddp", "distributed.rdzv=node1:x", says=["'node1:x' is not host:port"]
    ),
    "nodes that nothing starts": train(
        "distributed=ddp", "distributed.num_nodes=2", "distributed.num_processes=1",
        says=["started by itself", "srun --nodes=2 --ntasks-per-node=1 rloo train", "torchrun"],
    ),
    "a step of another number of nodes": train(
        "distributed=ddp", "distributed.num_nodes=2", "distributed.num_processes=1",
        env={"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"},
        says=["num_nodes = 2, and this Slurm step has 3", "distributed.num_nodes=3, or srun"],
    ),
    "torchrun's processes for a single one": train(
        env={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        says=["torchrun started 2 processes", "distributed=ddp, distributed=zero2 or"],
    ),
    "more of torchrun's processes than prompts": train(
        "distributed=ddp", "train.prompts_per_step=2",
        env={"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        says=["train.prompts_per_step = 2 is less than the 3 processes"],
    ),
    "a rank without a meeting place": train(
        "distributed=ddp", env={"RANK": "0", "WORLD_SIZE": "2"},
        says=["MASTER_ADDR is not set", "unset RANK WORLD_SIZE"],
    ),
    "BM-1 a folder that is not there": train(
        "model.path=./nothing", says=["model.path = './nothing' does not exist", "HERE/nothing"]
    ),
    "BM-1 a name that is not cached": train(
        "model.path=org/nothing",
        code=3,
        env={"HF_HOME": "HERE/home"},
        says=["'org/nothing' was not found", "HERE/home/hub", "rloo fetch +recipe=smoke model."],
    ),
    "BR-1 a reward with a slip": train("reward=accuracyy", says=["fix      reward=accuracy\n"]),
    "BR-2 no file": train(
        "reward=function", "reward.function.path=no.py:f", says=["no.py does not exist", "HERE/no"]
    ),
    "BR-2 no Python": train(
        "reward=function",
        "reward.function.path=a.py:f",
        files={"a.py": "x = 1\ndef f(:\n"},
        says=["a.py is not valid Python", "where    a.py:2"],
    ),
    "BR-2 no such function": train(
        "reward=function",
        "reward.function.path=a.py:scor",
        files={"a.py": "def score(completions): ...\n"},
        says=["a.py has no 'scor'", "fix      reward.function.path=a.py:score"],
    ),
    "BR-2 Python's own": train(
        "reward=function",
        "reward.function.path=os:system",
        "reward.function.kwargs={command: touch pwned}",
        says=["os comes with Python or with rloo", "reward.function.path=file.py:name"],
    ),
}  # fmt: skip

# What a clumsy hand writes.
WORDS: dict[str, tuple[str, str]] = {
    "nothing": ("", "'' is not key=value"),
    "an equals sign": ("=", "is not key=value"),
    "a value alone": ("=5", "is not key=value"),
    "a flag of Hydra's that is not ours": ("--hydra-help", "is not a flag of rloo"),
    "a package": ("model@x=tiny", "is not key=value"),
    "a letter that is none": ("ålgorithm.beta=1", "cannot be read"),
    "text without quotes": ("data.system=Ünï", "fix      'data.system=\"Ünï\"'"),
    "a line's end": ("name=a\nb", "cannot be read"),
    "a number of 5000 digits": ("max_steps=" + "9" * 5000, "does not compose"),
    "a number beyond 64 bits": ("max_steps=" + "9" * 30, "beyond 9223372036854775807"),
    "a seed beyond 32 bits": ("seed=4294967296", "less than 4294967296"),
    "a number beyond floats": ("algorithm.beta=1e400", "finite number, got inf"),
    "a float for an integer": ("max_steps=1e3", "valid integer, got 1000.0"),
    "true for a number": ("seed=true", "valid integer, got True"),
    "a list for a number": ("algorithm.beta=[1]", "valid number, got [1]"),
    "a number for a section": ("train=5", "train = 5 is not a section"),
    "null for a section": ("eval=null", "eval = None is not a section"),
    "null for the rewards' defaults": ("reward_defaults=null", "is not a section"),
    "keys for a choice": ("model={path: x}", "fix      model.KEY=VALUE"),
    "no choice": ("algorithm=null", "algorithm.name = None"),
    "two recipes": ("+recipe=quickstart", "2 recipes"),
    "a list of recipes": ("+recipe=[smoke]", "there is no recipe '[smoke]'"),
    "a depth without end": ("train.optimizer_kwargs=" + "{a:" * 300 + "1" + "}" * 300, "compose"),
    "an absolute name": ("name=/tmp/x", "name = '/tmp/x' is not valid"),
    "a name that climbs": ("name=..", "name = '..' is not valid"),
    "a name that is long": ("name=" + "a" * 200, "at most 150 characters"),
    "no root": ("root=", "root = '' is not valid"),
    "a root that is long": ("root=" + "a" * 900, "root is not a path"),
    "a root that is a file": ("root=afile", "root = 'afile' is not a folder"),
    "a root under a file": ("root=afile/x", "root = 'afile/x' is not a folder"),
    "a root that is a device": ("root=/dev/null", "is not a folder"),
    "no model": ("model.path=", "model.path = '' is not valid"),
    "null for a model": ("model.path=null", "valid string, got None"),
    "a blank for a model": ("model.path=' '", "neither a path nor a hub name"),
    "a name with a blank": ("model.path='a b'", "neither a path nor a hub name"),
    "a folder without a model": ("model.path=..", "has no config.json"),
    "a file for a model": ("model.path=./afile", "model.path = './afile' is a file"),
    "a tokenizer that is not there": ("model.tokenizer=./no", "model.tokenizer = './no' does not"),
    "no revision": ("model.revision=", "model.revision = '' is not valid"),
    "a template that is a folder": ("model.chat_template=.", "is not a file"),
    "no data": ("data.path=", "data.path = '' is not valid"),
    "data that is a device": ("data.path=/dev/zero", "neither a file nor a folder"),
    "no split": ("data.split=", "data.split = '' is not valid"),
    "a stop that is empty": ("generation.stop=['']", "generation.stop.0 = '' is not valid"),
    "a token below 0": ("generation.stop_token_ids=[-1]", "greater than or equal to 0, got -1"),
    "a least above the most": ("generation.min_tokens=17", "more than a completion may have"),
    "an optimizer that is none": ("train.optimizer=adam", "fix      train.optimizer=adamw"),
    "Python's own optimizer": ("train.optimizer=os:system", "os comes with Python or with rloo"),
    "a schedule that is none": ("train.lr_scheduler=linar", "fix      train.lr_scheduler=linear"),
    "a rate that is 0 for a computer": ("train.learning_rate=1e-400", "learning_rate = 1e-400 wou"),
    "one in a list": ("train.optimizer_kwargs={betas:[1e-400,0.9]}", "kwargs.betas.0 = 1e-400"),
    "a rate that no run survives": ("train.learning_rate=1e6", "less than or equal to 10, got 100"),
    "sft's rate": ("sft.learning_rate=11", "less than or equal to 10, got 11"),
    "a reward model's": ("reward_model.learning_rate=11", "less than or equal to 10, got 11"),
    "a stop that is no text": (
        "generation.stop=[false]",
        "'generation.stop=[\"false\"]' on the comm",
    ),
    "a stop that is a number": (
        "generation.stop=[5]",
        'fix      stop: ["5"] in a file, \'generation.',
    ),
    "a key that no sweeper has": ("hydra.sweeper.x=1", "hydra/sweeper=basic has max_batch_size, p"),
    "one that is near": ("hydra.sweeper.max_batch=1", "mean hydra.sweeper.max_batch_size?"),
    "a key that no launcher has": ("hydra.launcher.x=1", "hydra/launcher=basic has no keys"),
    "a deadline without end": ("reward.length_tokens.timeout_s=1e20", "less than or equal to"),
    "a reward's key for all": ("reward_defaults.foo=1", "command line: reward_defaults.foo=1"),
    "a threadbare machine": ("distributed.threads=100000", "less than or equal to 4096"),
}
RECIPES: dict[str, Case] = {
    "text": recipe("hello\n", "is not a mapping of keys"),
    "a number": recipe("5\n", "is not a mapping of keys"),
    "a tab": recipe("a:\n\tb: 1\n", "is not valid YAML", "where    my.yaml:2"),
    "a key twice": recipe(MINE + "seed: 1\nseed: 2\n", "found duplicate key seed"),
    "two documents": recipe(MINE + "---\nseed: 3\n", "found another document"),
    "a NUL": recipe(MINE + "name: a\0b\n", "is not valid YAML"),
    "a key that is a list": recipe(MINE + "? [a, b]\n: 2\n", "is not valid YAML"),
    "a key that is null": recipe(MINE + "null: 2\n", "is not valid YAML"),
    "a key with dots": recipe(MINE + "algorithm.beta: 0.3\n", "fix      algorithm: {beta: VALUE}"),
    "10 MB": recipe(MINE + "#" * 10**7, "my.yaml is too large for a config"),
    "10,000 keys": recipe("".join(f"k{i}: 1\n" for i in range(10**4)), "is too large"),
    "200 levels": recipe(MINE + "x: " + "{a: " * 200 + "1" + "}" * 200, "over 30 levels deep"),
    "a long value": recipe(MINE + f"seed: {'a' * 10**5}\n", "seed = 'aaa", "my.yaml:6"),
    "no list of defaults": recipe("defaults: tiny\n", "is not a list of choices", "my.yaml:1"),
    "a map of defaults": recipe("defaults: {model: tiny}\n", "is not a list of choices"),
    "null for defaults": recipe("defaults: null\n", "is not a list of choices"),
    "a number in defaults": recipe("defaults: [1]\n", "is not a list of choices"),
    "a list in defaults": recipe("defaults: [[a]]\n", "is not a list of choices"),
    "no override": recipe(MINE.replace("override ", ""), "Multiple values for", "my.yaml"),
    "itself": recipe("defaults: [my]\n", "In 'my.yaml': Could not load 'recipe/my'"),
    "a section that is text": recipe(MINE + "algorithm: x\n", "algorithm = 'x' is not a section"),
    "another": recipe(MINE + "generation: x\n", "generation = 'x' is not a section"),
    "debug": recipe(MINE + "debug: x\n", "debug = 'x' is not a section"),
    "rewards' defaults": recipe(MINE + "reward_defaults: x\n", "reward_defaults = 'x' is not a"),
    "a list of rewards": recipe(MINE + "reward: [accuracy]\n", "[override /reward: [accuracy]]"),
    "a reward that is text": recipe(MINE + "reward: {x: accuracy}\n", "not a mapping of entries"),
    "a reward's type that is a list": recipe(MINE + "reward: {b: {type: [x]}}\n", "no such reward"),
    "an algorithm that is a list": recipe(MINE + "algorithm: {name: [x]}\n", "no such algorithm"),
    "a reward named with dots": recipe(
        MINE + "reward: {a.b: {type: length_chars}}\n", "reward.a.b is not a reward", "my.yaml:6"
    ),
    "a reward named as what pydantic has": recipe(
        MINE + "reward: {model_fields: {type: length_chars}}\n", "is not a reward"
    ),
    "a root with a line's end": recipe(MINE + 'root: "a\\nb"\n', "root = 'a\\nb' is not valid"),
    "a folder": Case(["train", "+recipe=d.yaml"], ["d.yaml is a folder"], files={"d.yaml/x": ""}),
    "a device": Case(["train", "+recipe=/dev/null.yaml"], ["does not exist"]),
    "a rate that is 0 for a computer": recipe(
        MINE + "train:\n  learning_rate: 1e-400\n", "learning_rate = 1e-400 would be", "my.yaml:7"
    ),
    "one in a list": recipe(
        MINE + "train: {optimizer_kwargs: {betas: [1.0e-400, 0.9]}}\n", "betas.0 = 1.0e-400 would"
    ),
    "a word that YAML reads as false": recipe(
        MINE + "generation:\n  stop: [no]\n",
        "generation.stop.0 = False is",
        "where    my.yaml:7",
        "without quotes, no, off and false are read as False",
        'fix      stop: ["no"] in a file',
    ),
    "an address": Case(["train", "+recipe=https://x.y/z.yaml"], ["does not exist"]),
}
MODELS = {
    "no JSON": ("{", "is not valid JSON"),
    "a list": ("[1]", "is not a mapping"),
    "endless": ("[" * 100_000, "is not valid JSON"),
    "many": ('{"max_position_embeddings": "many", "text_config": 3}', "which no model has"),
    "below 0": ('{"max_position_embeddings": -5}', "which no model has"),
    "beyond floats": ('{"max_position_embeddings": 1e999}', "which no model has"),
    "huge": ('{"max_position_embeddings": 99999999999}', "which no model has"),
    "small": ('{"max_position_embeddings": 1}', "context of 1 tokens"),
}
DIRS = {
    "a list": ("own/model/a.yaml", "[1]\n", "is not a mapping of keys"),
    "text": ("own/model/a.yaml", "x\n", "is not a mapping of keys"),
    "defaults that are none": ("own/model/a.yaml", "defaults: x\n", "is not a list of choices"),
    "itself": ("own/model/a.yaml", "defaults: [a]\n", "it has no end"),
    "what is not there": ("own/model/a.yaml", "defaults: [nope]\n", "Could not load 'model/nope'"),
    "a shipped name": ("own/model/tiny.yaml", "path: x\n", "'tiny' is taken"),
    "a shipped recipe's name": ("own/recipes/smoke.yaml", "seed: 1\n", "'smoke' is taken"),
}
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
    "a key as a flag": ([SMOKE, "--algorithm.beta=0.1"], "algorithm.beta=0.1"),
    "a model of the hub": ([SMOKE, "model=org/name"], "model.path=org/name"),
    "one without /": ([SMOKE, "model=gpt2"], "model.path=gpt2, for a name on the hub or a folder"),
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
    "PPO's key without PPO": (
        [SMOKE, "algorithm.vf_coef=0.1"], "algorithm=ppo, or leave algorithm.vf_coef out"
    ),
    "what there is nothing for": ([SMOKE, "data_collator=x"], "leave data_collator out"),
}  # fmt: skip
MISSPELT = {  # a key without which nothing runs: its misspelling is named, not what it lacks
    "on the command line": train("model=default", "model.pth=x", says=["fix      model.path=x"]),
    "at the top": train("model=default", "model_path=x", says=["model_path is not a key"]),
    "in a section that is none": train("model=default", "modle.path=x", says=["modle.path is not"]),
    "in a recipe": recipe(
        MINE.replace("model: tiny", "model: default") + "model:\n  pth: x\n",
        "model.pth is not a key", "my.yaml:7", "fix      model.path=x",
    ),
    "of a reward": train(
        "reward=function", "reward.function.pth=my.py:f", says=["reward.function.path=my.py:f"]
    ),
}  # fmt: skip
CASES = SCORECARD | {f"word: {name}": train(word, says=[said], files={"afile": ""})
                     for name, (word, said) in WORDS.items()}  # fmt: skip
CASES |= {f"recipe: {name}": case for name, case in RECIPES.items()}
CASES |= {
    f"config.json: {name}": train("model.path=m", files={"m/config.json": text}, says=[said])
    for name, (text, said) in MODELS.items()
}
CASES |= {
    f"config-dir: {name}": train("--config-dir=own", "model=a", files={path: text}, says=[said])
    for name, (path, text, said) in DIRS.items()
}
CASES |= {
    f"first: {name}": Case(["train", *words], [f"  fix      {fix}\n"], files={"my.yaml": MINE})
    for name, (words, fix) in FIRST.items()
}
CASES |= {
    "a sweep's key that its launcher lacks": train(
        "--multirun", "seed=1,2", "hydra/launcher=submitit_slurm", "hydra.launcher.partiton=x",
        says=["submitit_slurm has submitit_folder, ", "mean hydra.launcher.partition?"],
    ),
    "one that joblib lacks": train(
        "-m", "hydra/launcher=joblib", "hydra.launcher.jobs=2", says=["joblib has n_jobs, "]
    ),
}  # fmt: skip
CASES |= {f"misspelt: {name}": case for name, case in MISSPELT.items()}
CASES |= {
    "config-dir: not there": train("--config-dir", "nowhere", says=["nowhere is not a folder"]),
    "config-dir: a reward's list": train(
        "reward={unique_chars: 3}", says=["reward takes the name of a choice"]
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    return ask(CASES, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_cleanly_with_a_reason(name: str, answers: dict[str, Answer]) -> None:
    case, answer = CASES[name], answers[name]
    says = [part.replace("HERE", answer.folder) for part in case.says]
    is_clean(Case(case.words, says, case.code), answer)


@pytest.mark.parametrize("name", [f"misspelt: {name}" for name in MISSPELT])
def test_a_misspelt_key_that_nothing_runs_without_is_one_story(
    name: str, answers: dict[str, Answer]
) -> None:
    assert answers[name].err.count("error: ") == 1
    assert " has no value\n  where" not in answers[name].err


@pytest.mark.parametrize("name", SCORECARD)
def test_the_scorecards_refusals_name_what_where_and_why(
    name: str, answers: dict[str, Answer]
) -> None:
    for part in ("error: ", "\n  where    ", "\n  why      "):
        assert part in answers[name].err


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
    fixes = [f"  fix      {f}\n" for f in ("algorithm.beta=0.01", "algorithm.beta=0.05", "seed=1")]
    for (name, answer), fix in zip(found.items(), fixes, strict=True):
        assert fix in answer.err, name


def test_what_is_known_without_torch_is_what_the_libraries_say() -> None:
    assert set(rules.LR_SCHEDULES) == {s.value for s in SchedulerType}
    shapes = {"tiny": tiny.SHAPE, "tiny_reward": tiny.SHAPE, "addition": addition.SHAPE}
    shapes |= dict.fromkeys(("tldr_base", "tldr_sft", "tldr_reward"), tldr.SHAPE)
    shapes["addition_shallow"] = addition.SHAPE
    shapes |= dict.fromkeys(("smollm2", "smollm2_shallow"), model_families.SMOLLM2)
    shapes |= dict.fromkeys(("products", "game"), tool_model.SHAPE)
    shapes["vision"] = vision_model.TEXT_SHAPE
    assert {
        n: s["max_position_embeddings"] for n, s in shapes.items()
    } == synthetic.SYNTHETIC_CONTEXT_LENGTHS
