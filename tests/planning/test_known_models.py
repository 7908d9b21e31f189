"""The models whose config values are built in: what was counted of them, and what is published."""

import dataclasses
import json

import pytest

from rloo_cli.planning import model_spec

# Published parameters, each with its source: the hub's count of the elements in its safetensors
# (`safetensors.total` of the API), where the weights are stored once; else a paper or a README.
HUB = "https://huggingface.co/api/models/"
KERAS = "https://github.com/keras-team/keras-hub/blob/master/keras_hub/src/models/"
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": (134_515_008, HUB + "HuggingFaceTB/SmolLM2-135M"),
    "Qwen/Qwen2.5-7B": (7_615_616_512, HUB + "Qwen/Qwen2.5-7B"),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, HUB + "Qwen/Qwen3-30B-A3B"),
    "EleutherAI/pythia-1b": (
        1_011_781_632, "https://github.com/EleutherAI/pythia, arXiv 2304.01373, table 1"
    ),
    "meta-llama/Llama-3.1-8B": (8_030_261_248, HUB + "meta-llama/Llama-3.1-8B"),
    "mistralai/Mistral-7B-v0.1": (7_241_732_096, HUB + "mistralai/Mistral-7B-v0.1"),
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, KERAS + "mixtral/mixtral_presets.py"),
    "google/gemma-2-2b": (2_614_341_888, HUB + "google/gemma-2-2b"),
    "google/gemma-3-4b-it": (4_300_079_472, HUB + "google/gemma-3-4b-it"),
    "microsoft/Phi-3-mini-4k-instruct": (3_821_079_552, KERAS + "phi3/phi3_presets.py"),
    "openai-community/gpt2": (
        124_439_808, KERAS + "gpt2/gpt2_presets.py"
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": (3_754_622_976, HUB + "Qwen/Qwen2.5-VL-3B-Instruct"),
    "HuggingFaceTB/SmolVLM-256M-Instruct": (
        256_484_928, HUB + "HuggingFaceTB/SmolVLM-256M-Instruct"
    ),
}  # fmt: skip
ENTRIES = json.loads(model_spec.KNOWN_MODELS_FILE.read_text())


def _counted(config):
    """What the file holds of a model with these config values, in the types that JSON has."""
    spec = model_spec.parse_model_spec(config, "", "")
    kept = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    del kept["name"], kept["source"]
    return json.loads(json.dumps(kept))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_has_as_many_parameters_as_its_makers_publish(name):
    published, source = PUBLISHED[name]
    assert model_spec.load_model_spec(name).total_params == published, source


def test_a_token_uses_as_many_parameters_of_a_mixture_as_its_makers_publish():
    found = model_spec.load_model_spec("mistralai/Mixtral-8x7B-v0.1")  # 13B, arXiv 2401.04088
    assert round((found.active_params + found.embedding_params + found.head_params) / 1e9) == 13
    found = model_spec.load_model_spec("Qwen/Qwen3-30B-A3B")  # 3.3B, arXiv 2505.09388
    used = found.active_params + found.embedding_params + found.head_params
    assert used / 1e9 == pytest.approx(3.3, abs=0.1)


SOON = ("make:tiny", "make:vision", "HuggingFaceTB/SmolVLM-256M-Instruct", "openai-community/gpt2",
        "google/gemma-2-2b", "EleutherAI/pythia-1b", "mistralai/Mixtral-8x7B-v0.1")  # fmt: skip


@pytest.mark.slow_but(*SOON)
@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["paths"][0] for entry in ENTRIES])
def test_what_the_file_holds_is_what_transformers_models_count(entry, request):
    counted = _counted(entry["config"])
    if request.config.getoption("--update") and counted != entry.get("counted"):
        entry["counted"] = counted
        text = "[\n" + ",\n".join(json.dumps(each) for each in ENTRIES) + "\n]\n"
        model_spec.KNOWN_MODELS_FILE.write_text(text)
    assert counted == entry["counted"]
