"""Configs, models and data made by somebody who means harm: nothing of theirs is ever run.

Each attack would leave a file, `pwned`; each test also shows that what it guards against is real
where that can be shown here.
"""

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from assert_refused import assert_refused
from policy_cases import fresh
from prompt_cases import config as data_config
from refusal_cases import MINE, SMOKE, Answer, Case, ask, is_clean, recipe, train
from reward_cases import function

from rloo_cli.config import hf_cache
from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import ModelConfig
from rloo_cli.data.prompts import tokenize_prompts
from rloo_cli.data.synthetic import tiny
from rloo_cli.policy import load
from rloo_cli.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.process

YAML = Path(__file__).parents[2] / "conf/model/default.yaml"

# Objects named in a config.

TARGETS = ["os.system", "posix.system", "torch.load", "torch.hub.load", "subprocess.Popen"]
TARGETS += ["builtins.exec", "hydra.utils.call", "rloo_cli.utils.errors.os.system"]
PLACES = ["model", "data", "generation", "algorithm", "distributed", "train", "eval", "logging"]
PLACES += ["checkpoint", "debug", "reward.unique_chars", "reward.mine", "eval.sets.hard"]
PLACES += ["train.optimizer_kwargs", "train.optimizer_kwargs.a.b", "train.lr_scheduler_kwargs"]
PLACES += ["generation.chat_template_kwargs", "data.columns", "nowhere", "algorithm.correction"]
OBJECTS = {"fix": "reward=function reward.function.path=file.py:name"}


def nested(key: str, target: str) -> str:
    """A recipe with the target and its argument at a dotted key."""
    inner: Any = {"_target_": target, "command": "touch HERE/pwned"}
    for part in reversed(key.split(".")):
        inner = {part: inner}
    return MINE + yaml.safe_dump(inner)


CASES: dict[str, Case] = {}
for number, root in enumerate(PLACES):
    target = TARGETS[number % len(TARGETS)]
    CASES[f"{target} on the command line, at {root}"] = train(
        f"+{root}.command='touch HERE/pwned'",
        f"+{root}._target_={target}",
        **OBJECTS,
        rule=root == "model",
    )
    CASES[f"{target} in a recipe, at {root}"] = recipe(
        nested(root, target), f"{root}._target_", **OBJECTS
    )
    group = {"model": "tiny", "data": "tiny", "algorithm": "rloo", "generation": "transformers"}
    if root in group:
        text = f"defaults: [{group[root]}, _self_]\n_target_: {target}\n"
        CASES[f"{target} in a group's file, of {root}"] = train(
            f"{root}=mine", "--config-dir=own", files={f"own/{root}/mine.yaml": text},
            key=f"{root}._target_", **OBJECTS,
        )  # fmt: skip
CASES["in a list"] = train(
    "+train.optimizer_kwargs.x=[1,[{_target_:os.system}]]", key="Python objects", **OBJECTS
)
CASES["in a list of a recipe"] = recipe(
    MINE + "train: {optimizer_kwargs: {x: [[{_target_: os.system}]]}}\n",
    "Python objects",
    **OBJECTS,
)
CASES["in a choice"] = train("algorithm={_target_: os.system}", fix="algorithm.KEY=VALUE")
CASES["as what is called in parts"] = train("+model._partial_=true", **OBJECTS)

# Hydra's own section, which can write, import and run.

HYDRA = {"fix": "root=FOLDER"}
CALLBACK = "{x: {_target_: logging.FileHandler, filename: HERE/pwned}}"
for word in (
    f"hydra.callbacks={CALLBACK}",
    "+hydra.callbacks.x._target_=os.system",
    "hydra.run.dir=HERE/pwned",
    "hydra.sweep.dir=HERE/pwned",
    "hydra.output_subdir=pwned",
    "hydra.job.chdir=true",
    "hydra.job.env_set.PATH=HERE",
    "hydra.searchpath=[file://HERE]",
    "hydra.job_logging={root: {handlers: [file]}}",
    "hydra/job_logging=default",
    "hydra/hydra_logging=default",
    "hydra/output=default",
    "hydra.sweeper._target_=os.system",
    "hydra.launcher={_target_: os.system}",
    "hydra.launcher._target_=os.system",
    "hydra.mode=MULTIRUN",
    "hydra={callbacks: 1}",
    "hydra=null",
    "~hydra.run",
    "~hydra",
):
    CASES[f"the word {word}"] = train(word, **HYDRA, rule=word == "hydra.run.dir=HERE/pwned")
    CASES[f"the word {word}, of a sweep"] = train("-m", "seed=1,2", word, **HYDRA)
for text in (
    f"hydra: {{callbacks: {CALLBACK}}}\n",
    "hydra: {run: {dir: HERE/pwned}, output_subdir: x}\n",
    "hydra: {job: {env_set: {PATH: HERE}}}\n",
    "hydra: {searchpath: ['file://HERE']}\n",
    "hydra.run.dir: HERE/pwned\n",
):
    CASES[f"a recipe with {text!r}"] = recipe(MINE + text, "hydra", **HYDRA)
    CASES[f"a group's file with {text!r}"] = train(
        "model=mine", "--config-dir=own", key="hydra", **HYDRA,
        files={"own/model/mine.yaml": f"# @package _global_\n{text}"},
    )  # fmt: skip
REACHES = {"key": "reaches into Hydra"}
HANDLER = "_target_: logging.FileHandler\nfilename: HERE/pwned\n"
CASES |= {
    "a callback in a recipe": recipe(
        MINE + f"hydra: {{callbacks: {CALLBACK}}}\n", "hydra", where="my.yaml:6", rule=True
    ),
    "a package of Hydra's": train(
        "model=mine", "--config-dir=own", **REACHES,
        files={"own/model/mine.yaml": f"# @package hydra.callbacks.x\n{HANDLER}"},
    ),
    "a package of Hydra's behind other comments": train(
        "model=mine", "--config-dir=own", **REACHES,
        files={"own/model/mine.yaml": f"# Mine.\n\n#  @package   hydra.callbacks.x\n{HANDLER}"},
    ),
    "a package that is the file's name": train(
        "model=hydra", "--config-dir=own", **REACHES,
        files={"own/model/hydra.yaml": "# @package _name_\ncallbacks: {}\n"},
    ),
    "a group of Hydra's": train(
        "--config-dir=own", **REACHES,
        files={"own/hydra/callbacks/x.yaml": HANDLER},
    ),
    "a default of Hydra's": recipe(MINE.replace(
        "defaults:", "defaults:\n  - override /hydra/launcher: joblib"), **REACHES),
    "a default put into Hydra's": recipe(MINE.replace(
        "defaults:", "defaults:\n  - /model@hydra.callbacks: tiny"), **REACHES),
    "a default of a group's file": train(
        "model=mine", "--config-dir=own", **REACHES,
        files={"own/model/mine.yaml": "defaults: [/hydra/output: default]\n"},
    ),
}  # fmt: skip

# YAML that would build objects, or that has no end.

TAG = "!!python/object/apply:os.system ['touch HERE/pwned']"
BOMB = "\n".join(
    ["a0: &a0 [x]", *(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40))]
)
for name, text, key in (
    ("an object", f"x: {TAG}\n", "valid YAML"),
    ("an object as key", f"? {TAG}\n: 1\n", "valid YAML"),
    ("a name", "x: !!python/name:os.system\n", "valid YAML"),
    ("a module", "x: !!python/module:antigravity\n", "valid YAML"),
    ("a tag of its own", "x: !exec 1\n", "!exec"),
    ("an alias bomb", BOMB + "\n", "too large"),
    ("what holds itself", "a: &a {b: *a}\n", "too large"),
    ("a merge bomb", "a: &a {b: 1}\n" + "c: {<<: [" + "*a," * 9999 + "*a]}\n", "too large"),
):
    CASES[f"a recipe with {name}"] = recipe(MINE + text, key, where="my.yaml")
    CASES[f"a file of a config dir, not chosen, with {name}"] = train(
        "--config-dir=own", files={"own/model/mine.yaml": text}, key=key,
        where="own/model/mine.yaml",
    )  # fmt: skip

# Names of folders and files: none leads elsewhere, is a flag, or commands a terminal or a shell.

NAMES = ["-x", "../x", "a/b", ".x", "..", "/etc/x", "x" * 151, "a b", "a;b", "$(x)", "a|b", "~"]
for name in NAMES:
    CASES[f"the name {name[:20]}"] = train(f"name='{name}'")
for key, line in (
    ("name", 'name: "a\\nb"'),
    ("name", 'name: "a\\e]0;b"'),
    ("root", 'root: "a\\nb"'),
    ("data.path", 'data: {path: "a\\nb"}'),
    ("model.path", 'model: {path: "a\\eb"}'),
):
    CASES[f"a recipe with {line}"] = recipe(MINE + f"{line}\n", key, where="my.yaml:6")
for name in ("../x", "a/b", "a b", "-x", "a\\nb"):
    for key, text in (
        ("eval.sets", f'eval: {{sets: {{"{name}": {{split: test}}}}}}'),
        ("reward", f'reward: {{"{name}": {{type: unique_chars}}}}'),
        ("data.mixture", f'data: {{path: null, mixture: {{"{name}": {{path: make:tiny}}}}}}'),
    ):
        CASES[f"{key} named {name}"] = recipe(MINE + f"{text}\n", key)

# What interpolation can reach.

CASES |= {
    "a token in a key": train(
        "data.system=${oc.env:HF_TOKEN}", env={"HF_TOKEN": "sentinel-1234"},
        fix="export HF_TOKEN=...",
    ),
    "a token in a name": recipe(
        MINE + "name: run-${oc.env:OPENAI_API_KEY}\n", "name", fix="export",
        env={"OPENAI_API_KEY": "sentinel-1234"},
    ),
    "a token by another name": recipe(
        MINE + "data: {system: '${oc.env:${data.template}}', template: HF_TOKEN}\n",
        "data.system", fix="export", env={"HF_TOKEN": "sentinel-1234"},
    ),
    "a resolver that is none": train("name=${exec:x}", key="interpolation type"),
    "a decoded object": recipe(
        MINE + "data: {columns: '${oc.decode:\"{_target_: os.system}\"}'}\n",
        "data.columns._target_", **OBJECTS
    ),
    "a created object": recipe(
        MINE + "data: {columns: '${oc.create:{_target_: os.system}}'}\n",
        "data.columns._target_", **OBJECTS
    ),
}  # fmt: skip

# Code that a config names.

EVIL = "import os\nos.system('touch HERE/pwned')\ndef f(completions): ...\n"
for path in (
    "os:system", "posix:system", "subprocess:run", "pickle:load", "runpy:run_path", "torch:load",
    "torch.hub:load", "pandas:read_pickle", "numpy:load", "yaml:unsafe_load",
    "transformers:pipeline", "hydra.utils:instantiate",
):  # fmt: skip
    words = ("reward=function", f"reward.function.path={path}")
    CASES[f"a reward that is {path}"] = train(
        *words, "reward.function.kwargs={command: touch HERE/pwned}",
        key="reward.function.path", fix="reward.function.path=file.py:name",
    )  # fmt: skip
for key in ("optimizer", "lr_scheduler"):
    CASES[f"the {key} os:system"] = train(f"train.{key}=os:system", fix="file.py:name")
CASES |= {
    "a reward's file, in a config that is wrong elsewhere": train(
        "reward=function", "reward.function.path=a.py:f", "algorithm.beta=abc",
        files={"a.py": EVIL},
    ),
    "a kernel from a hub": train(
        "model.attn_implementation=org/kernel", fix="model.trust_remote_code=true", rule=True
    ),
    "a model's kernel from a hub": train(
        "model.path=m", files={"m/config.json": '{"attn_implementation": "org/kernel"}'},
        key="attn_implementation = 'org/kernel'",
    ),
    "a model without end": train(
        "model.path=m", files={"m/config.json": '{"num_hidden_layers": 1000000000}'},
        key="num_hidden_layers = 1000000000",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    return ask(CASES, tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_and_leaves_no_trace(
    name: str, answers: dict[str, Answer], sentence: Callable[..., None]
) -> None:
    is_clean(CASES[name], answers[name], sentence)
    assert "sentinel" not in answers[name].err


def test_nothing_lies_beside_the_folders_either(answers: dict[str, Answer]) -> None:
    base = Path(next(iter(answers.values())).folder).parent
    assert {p.name for p in base.iterdir()} == {"no_torch", *map(str, range(len(CASES)))}
    assert not [*base.rglob("pwned")]


def test_sweeps_can_still_be_set(tmp_path: Path) -> None:
    words = [
        "train",
        "-m",
        SMOKE,
        "seed=1,2",
        "hydra/launcher=basic",
        "hydra.sweeper.max_batch_size=1",
    ]
    ended = ask({"sweep": Case([*words, "--dry-run"])}, tmp_path, opens_data=True)["sweep"]
    assert (ended.code, ended.left) == (0, [])


def test_a_printed_config_has_no_secret_however_it_is_asked_for(tmp_path: Path) -> None:
    words = ["train", SMOKE, "data.system=${oc.env:HF_TOKEN}", "--cfg", "job"]
    env = {"HF_TOKEN": "sentinel-1234"}
    cases = {"plain": Case(words, env=env), "resolved": Case([*words, "--resolve"], env=env)}
    found = ask(cases, tmp_path)
    assert "system: ${oc.env:HF_TOKEN}" in found["plain"].out
    assert "system: [secret]\n" in found["resolved"].out
    assert all("sentinel" not in a.out + a.err for a in found.values())


# Models.


class Evil:
    """Pickled, it runs a command when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder."""
    fresh().save_pretrained(tmp_path / "model")
    tiny.tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(**yaml.safe_load(YAML.read_text()) | {"path": str(folder)} | changes)


def refuses_model(folder: Path, key: str = "model.path") -> None:
    with pytest.raises(ConfigError) as refused:
        load.load_causal_lm(settings(folder), str(folder), torch.device("cpu"))
    assert_refused(refused, key=key)
    assert not (folder.parent / "pwned").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "model.pt", "model.pkl"])
def test_weights_in_a_pickle_are_never_unpickled(name: str, folder: Path) -> None:
    evil = Evil(folder.parent / "pwned")
    with (folder / name).open("wb") as file:
        pickle.dump(evil, file)
    load.load_causal_lm(
        settings(folder), str(folder), torch.device("cpu")
    )  # the safetensors beside it
    (folder / "model.safetensors").unlink()
    refuses_model(folder, "model.safetensors")
    pickle.loads(pickle.dumps(evil)).close()
    assert (folder.parent / "pwned").exists()  # it would have


HEADERS = {
    "of 2^63 bytes": struct.pack("<Q", 2**63),
    "of 4 GB": struct.pack("<Q", 2**32),
    "that is none": struct.pack("<Q", 4) + b"abcd",
    "without end": struct.pack("<Q", 10**5) + b"[" * 10**5,
    "that is missing": b"",
    "beyond the file": struct.pack("<Q", 60)
    + json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode(),
}


@pytest.mark.parametrize("name", HEADERS)
def test_weights_with_an_absurd_header_are_refused(name: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(HEADERS[name])
    refuses_model(folder)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"vocab_size": 2**40}, "vocab_size = 1099511627776"),
        ({"hidden_size": 2**19}, "hidden_size = 524288"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"intermediate_size": -1}, "intermediate_size = -1"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers = 1000000000"),
        ({"attn_implementation": "org/kernel"}, "attn_implementation = 'org/kernel'"),
        ({"_attn_implementation": "org/kernel"}, "_attn_implementation = 'org/kernel'"),
        ({"vocab_size": "x"}, "model.path"),
        ({"num_hidden_layers": 3}, "model.path"),
        ({"model_type": "../../x"}, "model.path"),
    ],
    ids=str,
)
def test_a_config_that_no_model_has_is_refused(
    changes: dict[str, Any], key: str, folder: Path
) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    refuses_model(folder, key)


def test_a_models_config_names_no_code_that_is_run(folder: Path) -> None:
    mark = folder.parent / "pwned"
    (folder / "mine.py").write_text(f"open({str(mark)!r}, 'w')\nC = M = None\n")
    values = json.loads((folder / "config.json").read_text())
    values |= {"auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    values |= {"architectures": ["os.system"], "torch_dtype": "os.system", "_target_": "os.system"}
    (folder / "config.json").write_text(json.dumps(values))
    load.read_max_positions(settings(folder))
    load.load_policy_tokenizer(settings(folder))
    assert type(
        load.load_causal_lm(settings(folder), str(folder), torch.device("cpu"))
    ).__name__ == ("Qwen3ForCausalLM")
    assert not mark.exists()


TEMPLATES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "a tokenizer": "{{ raise_exception.__globals__['__builtins__'] }}",
    "an attribute": "{{ messages|map(attribute='__class__')|list|map(attribute='__mro__')|list }}"
    "{{ joiner.__init__.__globals__ }}",
    "no end": "{% for i in range(10**9) %}{% endfor %}",
    "a file": "{% include '/etc/passwd' %}",
    "an error of Python's": "{{ 1 / 0 }}",
    "no text": "{{ 'x' + messages[0]['content'] + 1 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_stays_in_its_box(name: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tokens = tiny.tiny_tokenizer()
    tokens.chat_template = TEMPLATES[name].replace("MARK", str(tmp_path / "pwned"))
    rows = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}])
    with pytest.raises(DataError) as refused:
        tokenize_prompts(rows, data_config(), tokens, {}, None, 1)
    assert_refused(refused, 4, "data.prompt_column", where="row 0")
    assert not (tmp_path / "pwned").exists()


# Code that is no reward, where it is loaded: a config.yaml is not checked again there.


@pytest.mark.parametrize(
    ("spec", "argument"),
    [
        ("os:system", "command"),
        ("runpy:run_path", "path_name"),
        ("pandas:read_pickle", "filepath_or_buffer"),
        ("numpy:load", "file"),
    ],
)
def test_what_takes_nothing_of_the_completions_is_not_called(
    spec: str, argument: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        function(spec, **{argument: f"touch {tmp_path / 'pwned'}"})
    assert_refused(refused, fix="def score(completions")
    assert not (tmp_path / "pwned").exists()


# The hub's cache.


@pytest.mark.parametrize(
    "name", ["../x", "a/../b", "/etc", "a b", "", ".", "..", "a/b/c", "x" * 99]
)
def test_what_is_no_hub_name_is_not_looked_for(name: str) -> None:
    assert not hf_cache.is_hub_name(name)


def test_a_revision_cannot_climb_out_of_the_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    known = tmp_path / "hub" / "models--org--name"
    (known / "snapshots" / "abc").mkdir(parents=True)
    (known / "refs").mkdir()
    (known / "refs" / "main").write_text("abc")
    (tmp_path / "config.json").write_text("{}")
    assert hf_cache.snapshot_folder("org/name") == known / "snapshots" / "abc"
    assert hf_cache.snapshot_folder("org/name", "abc") == known / "snapshots" / "abc"
    for revision in ("nope", "../../..", "../../../..", "/", str(tmp_path)):
        assert hf_cache.snapshot_folder("org/name", revision) is None, revision
    shutil.rmtree(known)
    assert hf_cache.snapshot_folder("org/name") is None


@pytest.mark.parametrize(
    "override",
    ["algorithm.num_generations=1000000000", "eval.num_generations=1000000000",
     "train.prompts_per_step=1000000000"],
)  # fmt: skip
def test_a_number_of_completions_that_would_take_days_is_refused(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(compose_config(["+recipe=smoke", override]))
    assert_refused(refused, key=override.partition("=")[0], where=override)


def test_a_whole_number_of_thousands_of_digits_in_a_file_is_an_error_with_its_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(f"defaults: [smoke]\nmax_steps: {'1' * 5000}\n")
    with pytest.raises(ConfigError) as refused:
        compose_config([f"+recipe={path}"])
    assert_refused(refused, where="long.yaml:2")
