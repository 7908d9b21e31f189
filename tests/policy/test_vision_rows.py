"""Images in a forward pass: rows are those of the model alone, and the tower runs once a prompt."""

import pytest
import torch
import vision_cases as v
from layout_cases import gradients, worst
from lora_cases import keys, move
from policy_cases import fresh

from rloo_cli.data import segments
from rloo_cli.data.episode_media import row_media
from rloo_cli.data.packing import pack_micro_batch, whole_group_slices
from rloo_cli.distributed import gather
from rloo_cli.policy import layouts, load, lora, shared_attention
from rloo_cli.policy.layout_support import why_not_shared
from rloo_cli.policy.model import PlainSequence, Policy
from rloo_cli.policy.vision import freeze_parts, modules_beside_language
from rloo_cli.utils.errors import ConfigError, NumbersError

CASES = [
    (name, layout)
    for name in v.FAMILY_NAMES
    for layout in ("padded", "packed", "shared")
    if (name, layout) != ("gemma3", "shared")
]


def made(name):
    model, vision = v.fresh(name)
    load.zero_dropout(model)
    return Policy(model.train(), 1.0), vision, v.groups(vision)


def row_by_row(policy, groups):
    """By the model's own forward, one row at a time, with its own tower. -> (N,)"""
    found = []
    for group in groups:
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            media = row_media(group, rollout, policy.vision)
            whole = ids if media is None else PlainSequence(ids, media)
            logits = policy.call(whole, (), False)[0, len(group.prompt_ids) - 1 : -1]
            logp = segments.target_logprobs(logits, torch.tensor(rollout.completion_ids), 1.0)
            sampled = torch.tensor(rollout.mask or [1] * len(logp))
            found.append(logp[sampled == 1])
    return torch.cat(found)


def laid(policy, groups, layout, vision=None):
    if layout == "shared":
        shared_attention.install_shared_attention(policy.model)
    slices = whole_group_slices(groups, range(len(groups)))
    return pack_micro_batch(groups, slices, layout=layout, with_images=True, vision=vision)


@pytest.mark.slow_but(
    "qwen2_vl-padded",
    "qwen2_5_vl-padded",
    "gemma3-padded",
    "llava_next-shared",
    "idefics3-shared",
    "smolvlm-shared",
    "internvl-shared",
)
@pytest.mark.parametrize("name, layout", CASES)
def test_rows_of_0_1_and_2_images_are_those_of_the_model_alone(name, layout):
    policy, _, groups = made(name)
    expected = row_by_row(policy, groups)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    of_rows = gradients(policy.model)
    policy.model.zero_grad()
    (found,), *_ = policy.call(laid(policy, groups, layout), [1.0], False)
    (found * weights).sum().backward()
    assert float((found - expected).detach().abs().max()) < 1e-5
    assert worst(gradients(policy.model), of_rows) < 1e-4


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_swapping_the_images_of_two_prompts_changes_their_rows_and_no_other(name):
    policy, vision, _ = made(name)
    one, other = v.picture(20, 24, 1), v.picture(20, 24, 2)
    lengths = ((3, 5), (4, 1), (2, 6))
    policy.layout = layout = "padded" if name == "gemma3" else "shared"
    sums = []
    for shown in (((one,), (other,), ()), ((other,), (one,), ())):
        batch = laid(policy, v.groups(vision, shown, lengths), layout)
        with torch.no_grad():
            (logp,), *_ = policy.call(batch, [1.0], False)
        sums.append(segments.segment_sum(logp, batch.sequence_ids, 6))
    changed = (sums[0] - sums[1]).abs() > 1e-4
    assert changed.tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_the_tower_sees_each_prompts_images_once_however_many_rows_show_them(layout):
    policy, _, groups = made("qwen2_5_vl")
    seen = []
    tower = policy.model.model.visual
    tower.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    batch = laid(policy, groups, layout)
    policy.call(batch, [1.0], False)
    patches = sum(len(g.media.tensors["pixel_values"]) for g in groups if g.media is not None)
    assert seen == [patches]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl"])
def test_positions_are_those_that_the_model_computes_itself(name):
    policy, vision, groups = made(name)
    for media in (g.media for g in groups if g.media is not None):
        ids = torch.tensor([media.prompt_ids])
        own, shift = policy.model.model.get_rope_index(
            ids, (ids == vision.image_token_id).int(), media.tensors["image_grid_thw"]
        )
        assert torch.equal(media.positions, own[:, 0])
        assert media.next_position == len(media.prompt_ids) + int(shift)


def test_a_run_chooses_the_shared_layout_after_trying_it_on_its_images():
    policy, _, groups = made("qwen2_5_vl")
    policy.image_examples = [g for g in groups if g.media is not None]
    choice = layouts.choose_policy_layout(policy, "auto", 200)
    assert str(choice) == "shared, head fused"
    policy, _, groups = made("gemma3")
    assert "bidirectionally" in why_not_shared(policy.model)


def test_a_model_that_does_not_see_its_images_is_refused():
    policy, _, groups = made("qwen2_5_vl")
    policy.image_examples = [g for g in groups if g.media is not None]
    with torch.no_grad():
        for weight in policy.model.model.visual.merger.parameters():
            weight.zero_()
    with pytest.raises(NumbersError, match="see its images"):
        layouts.choose_policy_layout(policy, "auto", 200)


def test_a_frozen_tower_has_no_gradient_and_a_missing_one_is_refused():
    policy, _, groups = made("qwen2_5_vl")
    assert freeze_parts(policy.model, ["vision"]) > 0
    (logp,), *_ = policy.call(laid(policy, groups, "padded"), [1.0], False)
    logp.sum().backward()
    assert not any(".visual." in name for name in gradients(policy.model))
    with pytest.raises(ConfigError, match="no such part"):
        freeze_parts(fresh("llama"), ["vision"])


@pytest.mark.parametrize(
    "name, layout",
    [("qwen2_5_vl", "shared"), ("qwen2_5_vl", "padded"), ("idefics3", "shared"),
     ("gemma3", "packed"), ("llava_next", "shared")],
)  # fmt: skip
def test_an_adapter_in_the_tower_trains_row_by_row_and_is_off_for_the_reference(name, layout):
    policy, _, groups = made(name)
    plain = row_by_row(policy, groups).detach()
    lora.attach_adapter(policy.model, keys(), seed=1)
    move(policy.model)
    inside = {n for n, w in policy.model.named_parameters() if w.requires_grad and "vis" in n}
    assert inside and lora.adapted_beside_language(policy.model)
    expected = row_by_row(policy, groups)
    assert float((expected - plain).detach().abs().max()) > 1e-3
    expected.square().sum().backward()
    of_rows = gradients(policy.model)
    assert inside & of_rows.keys()
    policy.model.zero_grad()
    batch = laid(policy, groups, layout)
    (found,), *_ = policy.call(batch, [1.0], False)
    found.square().sum().backward()
    assert float((found - expected).detach().abs().max()) < 1e-4
    assert worst(gradients(policy.model), of_rows) < 1e-4
    with torch.no_grad(), lora.use_adapter(lora.adapter_layers(policy.model), None):
        (off,), *_ = policy.call(batch, [1.0], False)
    assert float((off - plain).abs().max()) < 1e-5


def test_an_adapter_of_the_language_model_alone_is_not_beside_it():
    model, _ = v.fresh("qwen2_5_vl")
    lora.attach_adapter(model, keys(target_modules=["q_proj", "v_proj"]), seed=1)
    assert lora.adapted_beside_language(model) == []
    lora.attach_adapter(text := fresh("qwen3"), keys(), seed=1)
    assert lora.adapted_beside_language(text) == []


@pytest.mark.parametrize("name", v.FAMILY_NAMES)
def test_rows_of_text_may_run_the_tower_and_are_what_they_were(name):
    """Ranks that meet in every forward have the same weights to gather, and to add up."""
    policy, vision, groups = made(name)
    expected = row_by_row(policy, groups[1:2]).detach()
    policy.blank_vision = vision
    trained = []
    for shown in (groups[1:2], groups[:1]):
        policy.model.zero_grad(set_to_none=True)
        logp = policy.logp(policy.pack(shown, whole_group_slices(shown, [0]))).logp
        logp.sum().backward()
        trained.append(
            {n: w.grad for n, w in policy.model.named_parameters() if w.grad is not None}
        )
        if shown == groups[1:2]:
            assert torch.allclose(logp, expected, atol=1e-5)
    of_text, of_image = trained
    beside = modules_beside_language(policy.model)
    tower = [n for n in of_image if beside & {*n.split(".")}]
    assert of_text.keys() == of_image.keys() and tower
    assert not any(of_text[n].any() for n in tower) and all(of_image[n].any() for n in tower[:1])


def test_images_are_computed_within_a_forward_of_the_model_that_owns_weights_beside_its_modules():
    """Shards gather such weights, as the line ends of LLaVA-NeXT, where that forward begins."""
    policy, _, groups = made("llava_next")
    began = []
    policy.model.base_model.register_forward_pre_hook(lambda *_: began.append(1))
    policy.logp(policy.pack(groups[:1], whole_group_slices(groups[:1], [0])))
    assert len(began) == 2  # of the images, and of the tokens


@pytest.mark.parametrize("name", v.FAMILY_NAMES)
def test_the_layers_that_shards_are_made_of_are_the_language_models(name):
    model, _ = v.fresh(name)  # its tower has as many
    beside = modules_beside_language(model)
    names = {module: n for n, module in model.named_modules()}
    layers = [names[layer] for layer in gather.decoder_layers(model)]
    assert len(layers) == 2 and not any(beside & {*n.split(".")} for n in layers)
