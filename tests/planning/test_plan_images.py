"""A plan of a vision-language model counts its tower, and what an image costs."""

import pytest
import vision_cases as v
from plan_cases import GPU

from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.config.vision_models import VISION_FAMILIES
from rloo_cli.planning import meta_model, model_spec
from rloo_cli.planning.peak_memory import tower_bytes
from rloo_cli.planning.plan_inputs import collect_plan_inputs
from rloo_cli.planning.static_memory import trained_params


@pytest.mark.parametrize("name", v.FAMILY_NAMES)
def test_parameters_of_the_tower_are_those_of_the_model(name):
    model, _ = v.fresh(name)
    found = model_spec.parse_model_spec(model.config.to_dict(), name, "")
    family = VISION_FAMILIES[name]

    def count(parts):
        named = model.named_parameters()
        return sum(weight.numel() for path, weight in named if {*parts} & {*path.split(".")})

    towers, between = count(family.towers), count(family.projectors)
    assert (found.tower.tower_params, found.tower.projector_params) == (towers, between)
    assert found.total_params == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", v.FAMILY_NAMES)
def test_a_layer_of_a_tower_keeps_what_autograd_saves_of_it(name, monkeypatch):
    def fail(*_):
        raise AssertionError("it was not measured")

    model, _ = v.fresh(name)
    monkeypatch.setattr(meta_model, "_bytes_of_linears", fail)
    found = meta_model.count_model(model.config.to_dict())
    assert 0 < found.tower.saved_bytes(2) < found.tower.saved_bytes(4)
    assert 0 < found.saved_bytes(2) < found.saved_bytes(4)


def test_an_image_token_of_a_known_model_is_made_of_28_by_28_pixels():
    tower = model_spec.load_model_spec("Qwen/Qwen2.5-VL-3B-Instruct").tower
    assert tower is not None and tower.pixels_per_token == 28 * 28


def test_a_frozen_tower_needs_neither_gradients_nor_activations():
    def planned(*words):
        return collect_plan_inputs(
            check_config(compose_config(["+recipe=vision_mini", *words])), GPU
        )

    whole, frozen = planned(), planned("model.freeze=[vision]")
    tower = whole.model.tower
    assert trained_params(whole)[0] - trained_params(frozen)[0] == tower.tower_params
    assert tower_bytes(whole, 1000) > 0 == tower_bytes(frozen, 1000)
