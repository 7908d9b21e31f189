"""Models and tokenizers from folders and hub names, and why one is refused."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from assert_refused import assert_refused
from policy_cases import fresh
from safetensors.torch import load_file, save_file

from rloo_cli.config.schema import ModelConfig
from rloo_cli.data.synthetic import tiny
from rloo_cli.policy import load
from rloo_cli.utils.errors import ConfigError, MachineError

YAML = Path(__file__).parents[2] / "conf/model/default.yaml"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def _saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    fresh().to(torch.bfloat16).save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(_saved, tmp_path):
    """A model's folder of one's own; its weights are in bfloat16."""
    return Path(shutil.copytree(_saved, tmp_path / "model"))


def config(path, **changes):
    return ModelConfig(**yaml.safe_load(YAML.read_text()) | {"path": str(path)} | changes)


def model(path, **changes):
    return load.load_causal_lm(config(path, **changes), str(path), CPU)


LOADERS = {
    "tokenizer": lambda path: load.load_policy_tokenizer(config(path)),
    "context": lambda path: load.read_max_positions(config(path)),
    "model": model,
}
loader = pytest.mark.parametrize("kind", LOADERS)


@pytest.mark.parametrize(
    "name, found",
    [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_the_weights_have_the_dtype_asked_for_and_float32_on_a_cpu(name, found, folder):
    assert model(folder, dtype=name).dtype is getattr(torch, found)


def test_loading_keeps_the_weights(folder):
    before, after = fresh().to(torch.bfloat16).state_dict(), model(folder).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k].float(), after[k]) for k in before)


def test_dropout_is_turned_off_unless_asked_for(tmp_path):
    fresh("gpt2", resid_pdrop=0.5, attn_pdrop=0.5).save_pretrained(tmp_path)
    rates = lambda m: {d.p for d in m.modules() if isinstance(d, torch.nn.Dropout)}  # noqa: E731
    assert rates(model(tmp_path)) == {0.0}
    assert rates(model(tmp_path, disable_dropout=False)) == {0.1, 0.5}


def test_gradient_checkpointing_is_turned_on_when_asked_for(folder):
    assert not model(folder).is_gradient_checkpointing
    assert model(folder, gradient_checkpointing=True).is_gradient_checkpointing


def test_pickled_weights_are_refused(folder):
    mark = folder / "mark"

    class Evil:
        def __reduce__(self):
            return open, (str(mark), "w")

    (folder / "model.safetensors").unlink()
    torch.save(fresh().state_dict() | {"x": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        model(folder)
    assert not mark.exists()


def test_a_checkpoint_without_the_output_head_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing: lm_head\.weight"):
        model(folder)


def test_a_head_that_is_the_embedding_is_not_missing(tmp_path):
    fresh(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    found = model(tmp_path)
    assert found.lm_head.weight is found.model.embed_tokens.weight


def test_weights_of_another_shape_are_refused(folder):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": 41}))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        model(folder)


def test_a_damaged_file_of_weights_is_refused(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        model(folder)


def test_an_attention_that_there_is_not_is_refused(folder):
    with pytest.raises(ConfigError, match="nope"):
        model(folder, attn_implementation="nope")


@loader
def test_a_folder_without_a_config_is_a_mistake_of_the_config(kind, tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        LOADERS[kind](tmp_path)
    assert str(tmp_path) in str(caught.value) and "model.path" in str(caught.value)


@loader
@pytest.mark.parametrize("name", ["nobody/nothing", "nothing"])
def test_what_is_neither_here_nor_cached_is_a_lack_of_the_machine(kind, name):
    with pytest.raises(MachineError) as caught:
        LOADERS[kind](name)
    assert_refused(caught, 3, repr(name), fix="rloo fetch +recipe=")


@loader
def test_a_folder_that_is_not_there_is_a_mistake_of_the_config(kind):
    with pytest.raises(ConfigError, match="looked at /no/such/folder"):
        LOADERS[kind]("/no/such/folder")


@pytest.fixture
def foreign(tmp_path):
    """A model of a kind that its own Python file brings, which leaves a mark when it is run."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    classes = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    values = {"model_type": "mine", "architectures": ["M"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(values))
    tokens = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["mine.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nC = M = T = None\n")
    return folder


@loader
def test_a_model_that_brings_code_is_refused_with_the_key_and_nothing_is_run(kind, foreign):
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
        LOADERS[kind](foreign)
    assert not (foreign.parent / "mark").exists()


def test_a_known_model_that_also_brings_code_is_loaded_without_it(folder, foreign):
    shutil.copy(foreign / "mine.py", folder)
    values = json.loads((folder / "config.json").read_text())
    values["auto_map"] = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    (folder / "config.json").write_text(json.dumps(values))
    assert type(model(folder)).__name__ == "Qwen3ForCausalLM"
    assert not (foreign.parent / "mark").exists()


def test_code_is_run_once_it_is_trusted(foreign):
    with pytest.raises(Exception):  # noqa: B017 - its classes are none
        load.read_max_positions(config(foreign, trust_remote_code=True))
    assert (foreign.parent / "mark").exists()


def test_the_revision_is_that_of_the_model_alone():
    asked = []
    settings = config("org/model", revision="abc", tokenizer="org/tokenizer", ref_path="org/ref")
    for name in ("org/model", "org/tokenizer", "org/ref"):
        load._load_pretrained(lambda path, **given: asked.append(given), name, name, settings)
    assert [given.get("revision") for given in asked] == ["abc", None, None]
    assert all(given["trust_remote_code"] is False for given in asked)


def test_a_tokenizer_without_a_pad_token_gets_its_end_of_text(tmp_path):
    tokens = tiny.tiny_tokenizer()
    tokens.pad_token = None
    tokens.save_pretrained(tmp_path)
    found = load.load_policy_tokenizer(config("nobody/nothing", tokenizer=str(tmp_path)))
    assert found.pad_token_id == found.eos_token_id == 1


def test_a_tokenizer_with_a_pad_token_keeps_it(folder):
    assert load.load_policy_tokenizer(config(folder)).pad_token_id == 0


def test_a_chat_template_from_a_file_takes_the_place_of_the_tokenizers(folder, tmp_path):
    assert load.load_policy_tokenizer(config(folder)).chat_template == tiny.TEMPLATE
    (tmp_path / "my.jinja").write_text("{{ messages[0]['content'] }}!")
    found = load.load_policy_tokenizer(config(folder, chat_template=str(tmp_path / "my.jinja")))
    talk = [{"role": "user", "content": "x"}]
    assert found.apply_chat_template(talk, tokenize=False) == "x!"


@pytest.mark.parametrize("name, length", [("qwen3", 64), ("gpt2", 64), ("mamba", None)])
def test_the_context_length_is_read_without_weights(name, length, tmp_path):
    fresh(name).config.save_pretrained(tmp_path)
    assert load.read_max_positions(config(tmp_path)) == length
