"""A plan of a vision-language model counts its tower, and what an image costs."""

import pytest
import torch
import transformers
import vision_cases as v
from plan_cases import GPU

from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.config.vision_models import VISION_FAMILIES
from rloo_cli.planning import model_spec
from rloo_cli.planning.peak_memory import tower_bytes
from rloo_cli.planning.plan_inputs import collect_plan_inputs
from rloo_cli.planning.static_memory import trained_params

EXACT = ("qwen2_5_vl", "qwen2_vl")


@pytest.mark.parametrize("name", v.FAMILY_NAMES)
def test_parameters_of_the_tower_are_those_of_the_model(name):
    model, _ = v.fresh(name)
    tower = model_spec.parse_model_spec(model.config.to_dict(), name, "").tower
    family = VISION_FAMILIES[name]

    def count(parts, without=()):
        return sum(
            weight.numel()
            for path, weight in model.named_parameters()
            if {*parts} & {*path.split(".")} and not {*without} & {*path.split(".")}
        )

    towers, between = count(family.towers), count(family.projectors)
    found = tower.tower_params + tower.projector_params
    assert found == pytest.approx(towers + between, rel=1e-9 if name in EXACT else 0.12)


def test_the_known_model_is_counted_as_transformers_builds_it():
    values = model_spec.model_config_values("Qwen/Qwen2.5-VL-3B-Instruct")
    with torch.device("meta"):
        config = transformers.Qwen2_5_VLConfig(
            text_config=values["text_config"],
            vision_config=values["vision_config"] | {"out_hidden_size": 2048},
            tie_word_embeddings=True,
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    spec = model_spec.load_model_spec("Qwen/Qwen2.5-VL-3B-Instruct")
    assert spec.total_params == sum(weight.numel() for weight in model.parameters())
    assert spec.tower.pixels_per_token == 28 * 28


def test_a_frozen_tower_needs_neither_gradients_nor_activations():
    def planned(*words):
        return collect_plan_inputs(
            check_config(compose_config(["+recipe=vision_mini", *words])), GPU
        )

    whole, frozen = planned(), planned("model.freeze=[vision]")
    tower = whole.model.tower
    assert trained_params(whole)[0] - trained_params(frozen)[0] == tower.tower_params
    assert tower_bytes(whole, 1000) > 0 == tower_bytes(frozen, 1000)
