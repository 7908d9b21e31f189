"""Models, references and tokenizers that do not fit are refused before the training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from assert_refused import assert_refused
from loop_cases import checked, make, sampled
from policy_cases import FAMILIES
from test_lora_experts import FAMILIES as MIXTURES
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rloo_cli.data.synthetic import tiny
from rloo_cli.train import guards
from rloo_cli.utils.errors import ConfigError, GenerationError, NumbersError

WORDS = 258  # of make:tiny's tokenizer
BETA = "algorithm.beta=0.1"


def saved(folder: Path, kind: Any = AutoModelForCausalLM, **changes: Any) -> Path:
    """A folder with a random Qwen3 and the tokenizer of make:tiny."""
    config = FAMILIES["qwen3"]()
    for key, value in ({"vocab_size": WORDS, "max_position_embeddings": 1024} | changes).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(folder)
    tiny.tiny_tokenizer().save_pretrained(folder)
    return folder


def change(file: Path, **values: Any) -> None:
    """Other values in a JSON file; None takes a key out."""
    found = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def test_weights_with_another_head_and_a_reference_of_another_size_are_refused_in_the_launcher(
    tmp_path: Path, sentence
) -> None:
    other = saved(
        tmp_path / "c", AutoModelForSequenceClassification, num_labels=1, tie_word_embeddings=True
    )
    small = saved(tmp_path / "s", vocab_size=200)
    plain = saved(tmp_path / "p")
    bare = saved(tmp_path / "b")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    faulty = {
        (f"model.path={other}",): "Qwen3ForSequenceClassification",
        (f"model.path={plain}", f"model.ref_path={other}", BETA): "model.ref_path",
        (f"model.path={plain}", f"model.ref_path={small}", BETA): "258 tokens",
        (f"model.path={bare}",): "tokenizer",
    }
    for words, key in faulty.items():
        with pytest.raises(ConfigError) as refused:
            checked(("digits",), words)
        assert_refused(refused, 2, key)
        sentence(refused)
    checked(("digits",), (f"model.path={plain}", f"model.ref_path={plain}", BETA))
    checked(("digits",), (f"model.path={bare}", f"model.tokenizer={plain}"))


def test_layers_that_the_config_does_not_count_are_refused(tmp_path: Path, sentence) -> None:
    folder = saved(tmp_path / "m", num_hidden_layers=2)
    change(folder / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, f"model.path={folder}")
    assert_refused(caught, 2, "model.layers.1.input_layernorm.weight")
    sentence(caught)
    change(folder / "config.json", num_nextn_predict_layers=1)  # the layer is one of these
    make(tmp_path, f"model.path={folder}")


def test_tokens_of_the_prompts_that_the_embedding_lacks_are_refused_before_any_weights_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sentence
) -> None:
    few = saved(tmp_path / "few", vocab_size=50)
    (few / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, f"model.path={few}")
    sentence(caught)
    more = saved(tmp_path / "more")
    tokens = tiny.tiny_tokenizer()
    tokens.add_tokens(["<never seen>"])
    tokens.save_pretrained(more)
    make(tmp_path, f"model.path={more}")
    assert "259 tokens, the model 258" in capsys.readouterr().out


def test_a_reference_whose_tokenizer_gives_words_other_ids_is_refused(
    tmp_path: Path, sentence
) -> None:
    folder = saved(tmp_path / "other")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    ids = tokens["model"]["vocab"]
    a, b = list(ids)[-2:]
    ids[a], ids[b] = ids[b], ids[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    policy = saved(tmp_path / "policy")
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, f"model.path={policy}", f"model.ref_path={folder}", BETA)
    assert_refused(caught, 2, "2 tokens", where="model.ref_path")
    sentence(caught)


def test_a_model_for_which_no_token_ends_a_completion_is_refused_unless_that_is_asked_for(
    tmp_path: Path, sentence
) -> None:
    folder = saved(tmp_path / "m", eos_token_id=None, pad_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    change(folder / "tokenizer_config.json", eos_token=None, pad_token=None)
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, f"model.path={folder}")
    assert_refused(caught, 2, fix="generation.stop_token_ids=[ID]")
    sentence(caught)
    make(tmp_path, f"model.path={folder}", "generation.ignore_eos=true")


def test_weights_that_are_not_numbers_end_with_the_exit_code_for_numbers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(NumbersError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        make(tmp_path, f"model.path={folder}")


def test_code_of_a_folder_that_is_not_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "m")
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "mine.M"})
    make(tmp_path, f"model.path={folder}")
    assert "(auto_map), which is" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["mamba", "qwen3_next"])
def test_a_model_with_a_state_of_its_own_is_refused_before_it_samples(
    family: str, tmp_path: Path, sentence
) -> None:
    config = (FAMILIES | MIXTURES)[family]()
    config.vocab_size, config.eos_token_id = WORDS, 1
    config.max_position_embeddings = 1024
    if family == "qwen3_next":  # with attention in no layer
        config.layer_types = ["linear_attention"] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    tiny.tiny_tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, "generation.allow_moe=true", f"model.path={tmp_path / 'm'}")
    assert_refused(caught, 2, "generation", fix="generation=vllm_server")
    sentence(caught)


def test_advice_about_a_sampler_that_differs_fits_the_backend(tmp_path: Path) -> None:
    run = make(tmp_path, f"model.path={saved(tmp_path / 'm')}")
    chosen = sampled(run)
    group = chosen.groups[0]
    group.old_logp = [torch.zeros(len(r.completion_ids)) for r in group.rollouts]
    with pytest.raises(GenerationError) as caught:
        guards.check_sampler_logprobs(run, chosen, [0])
    assert "decoding with a cache" in str(caught.value)
