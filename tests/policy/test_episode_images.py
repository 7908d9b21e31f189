"""Images that episodes were shown: their rows are those of the model alone, in every layout."""

import copy
import pickle

import pytest
import torch
import vision_cases as v
from layout_cases import gradients, worst
from test_vision_rows import CASES, laid, made, row_by_row

from rloo_cli.data.batch import Rollout, Turn
from rloo_cli.data.episode_media import row_media
from rloo_cli.data.images import encode_png
from rloo_cli.data.rollout_values import dump_rollout, load_rollout
from rloo_cli.utils.errors import ConfigError


def observed(vision, images):
    """The ids of a message with these images, as a chat template would put them."""
    plain = f"\nlook {vision.processor.image_token * len(images)} and"
    return vision.expand_prompt(plain, [image.size for image in images])


def episodes(vision, groups):
    """The groups with episodes: of each group one was shown one image, one shown two in two turns,
    and others none."""
    shown = [[[v.picture(24, 16, 7)]], [[v.picture(16, 20, 8)], [v.picture(20, 24, 9)]], [[]]]
    for n, group in enumerate(groups):
        for k, rollout in enumerate(group.rollouts):
            turns, said = [], rollout.completion_ids
            turns.append(Turn([], said, [-1.0] * len(said), "", "stop", 0))
            for images in shown[(n + k) % 3]:
                files = [encode_png(image) for image in images]
                own = Turn(observed(vision, images), said, [-1.0] * len(said), "", "stop", 0)
                own.images = files
                turns.append(own)
            group.rollouts[k] = Rollout.from_turns(turns, True, k)
    return groups


def prepared(name):
    policy, vision, groups = made(name)
    policy.vision = vision
    return policy, vision, episodes(vision, groups)


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
def test_rows_of_episodes_with_images_are_those_of_the_model_alone(name, layout):
    policy, vision, groups = prepared(name)
    expected = row_by_row(policy, groups)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    of_rows = gradients(policy.model)
    policy.model.zero_grad()
    (found,), *_ = policy.call(laid(policy, groups, layout, vision), [1.0], False)
    (found * weights).sum().backward()
    assert float((found - expected).detach().abs().max()) < 1e-5
    assert worst(gradients(policy.model), of_rows) < 1e-4


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_the_tower_sees_every_image_once_those_of_a_prompt_for_all_its_episodes(layout):
    policy, vision, groups = prepared("qwen2_5_vl")
    seen = []
    policy.model.model.visual.register_forward_pre_hook(
        lambda module, args: seen.append(len(args[0]))
    )
    policy.call(laid(policy, groups, layout, vision), [1.0], False)
    parts = {
        id(part): part
        for group in groups
        for rollout in group.rollouts
        for media in (row_media(group, rollout, vision),)
        if media is not None
        for part in media.parts
    }
    assert seen == [sum(len(part.tensors["pixel_values"]) for part in parts.values())]
    assert len(parts) == 2 + 6  # prompts with images, and turns with some


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl"])
def test_positions_behind_a_tools_image_are_those_that_the_model_computes_itself(name):
    policy, vision, groups = prepared(name)
    for group in groups:
        for rollout in group.rollouts:
            media = row_media(group, rollout, vision)
            if media is None:
                continue
            ids = torch.tensor([media.prompt_ids])
            own, shift = policy.model.model.get_rope_index(
                ids, (ids == vision.image_token_id).int(), media.tensors["image_grid_thw"]
            )
            assert torch.equal(media.positions, own[:, 0])
            assert media.position_shift == int(shift)


def test_an_episode_keeps_its_images_in_a_checkpoint_and_on_its_way_to_another_rank():
    _, vision, groups = prepared("qwen2_5_vl")
    rollout = next(r for g in groups for r in g.rollouts if any(t.images for t in r.turns))
    assert row_media(groups[0], rollout, vision) is rollout.media is not None
    for again in (pickle.loads(pickle.dumps(rollout)), copy.deepcopy(rollout)):
        assert again.turns == rollout.turns and again.media is None
    saved = dump_rollout(rollout)
    assert load_rollout(rollout.completion_ids, rollout.behaviour_logp, saved).turns[1].images


def test_values_of_a_rollout_without_images_are_as_before():
    turn = Turn([], [5], [-1.0], "", "stop", 0)
    saved = dump_rollout(Rollout.from_turns([turn], True, 0))
    assert "images" not in saved["turns"][0]


def test_images_that_nothing_processes_are_not_read_as_words():
    policy, _, groups = prepared("qwen2_5_vl")
    policy.vision = None
    with pytest.raises(ConfigError, match="has images"):
        policy.pack(groups, [(0, (0, 1))])
