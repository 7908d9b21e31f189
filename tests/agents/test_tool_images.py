"""Tools and environments that answer with images: what the model is shown, and what is refused."""

from pathlib import Path
from typing import Any

import agent_cases as a
import pytest
import vision_cases as v
from agent_cases import ScriptedSampler, call_text, write_file

from rloo_cli.agents.common import call_parsers
from rloo_cli.agents.common.episodes import EpisodeGenerator, EpisodeRules
from rloo_cli.agents.common.observations import ToolImages
from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.config import registry
from rloo_cli.data.batch import Group
from rloo_cli.data.images import decode_png

pytestmark = pytest.mark.process

TOOLS = '''
import io

from PIL import Image


def square(side: int) -> object:
    """Draws.

    Args:
        side: pixels
    """
    return Image.new("RGB", (side, side), (200, 0, 0))


def page() -> object:
    """Reads."""
    file = io.BytesIO()
    Image.new("RGB", (20, 24), (0, 0, 90)).save(file, "JPEG")
    return [{"type": "text", "text": "left "}, {"type": "image", "image": file.getvalue()},
            {"type": "text", "text": " right"}]


def broken() -> object:
    """Breaks."""
    return [{"type": "image", "image": b"no image"}]


def path() -> object:
    """Names a file."""
    return [{"type": "image", "image": "/etc/passwd"}]


class Room:
    def reset(self, **row) -> object:
        self.view = Image.new("RGB", (16, 16), (row["colour"], 0, 0))
        return [{"type": "text", "text": "You see "}, {"type": "image", "image": self.view}]

    def wait(self) -> str:
        """Waits."""
        return "nothing"
'''


@pytest.fixture(scope="module")
def vision() -> Any:
    return v.fresh("qwen2_5_vl")[1]


def generator(vision: Any, config: Any, script: Any, images: ToolImages) -> EpisodeGenerator:
    tokenizer = vision.tokenizer
    tools = registry.registered_module("agents", config.kind).load_tools(config)
    renderer = TurnRenderer(tokenizer, {}, {tokenizer.eos_token_id}, vision)
    parser = call_parsers.choose_parser(config.parser, tokenizer)[1]
    rules = EpisodeRules(config, tools, renderer, parser, 200, None, "sum", images)
    return EpisodeGenerator(Noted(tokenizer, script), rules)


class Noted(ScriptedSampler):
    """A sampler that keeps what it was asked with."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.groups: list[Group] = []

    def generate(self, groups: Any, *given: Any, **options: Any) -> None:
        self.groups += groups
        super().generate(groups, *given, **options)


def played(
    vision: Any, config: Any, script: Any, shown: Any = (), k: int = 1,
    images: ToolImages | None = None, **row: Any,
) -> tuple[list[Group], list[Group]]:  # fmt: skip
    """Episodes of one prompt that shows these images. -> the groups, what the sampler was asked"""
    made = generator(vision, config, script, images or ToolImages())
    ids, media = v.media(vision, shown)
    parts = [{"type": "image"} for _ in shown] + [{"type": "text", "text": "what?"}]
    group = Group(0, row, [{"role": "user", "content": parts}], ids, media=media)
    try:
        made.generate([group], [[*range(k)]])
    finally:
        made.close()
    return [group], made.inner.groups  # type: ignore[attr-defined]


def ask_once(call: str) -> Any:
    """A script that makes this call, and then answers."""
    return lambda prompt, seed: "done" if "<tool_call>" in prompt else call


def image_count(vision: Any, ids: list[int]) -> int:
    return ids.count(vision.image_token_id)


@pytest.mark.parametrize("shown", [(), ((20, 24), (16, 16))], ids=["text", "images"])
def test_a_tools_image_stands_where_the_tool_put_it(
    tmp_path: Path, vision: Any, shown: Any
) -> None:
    file = write_file(tmp_path, TOOLS)
    pictures = [v.picture(*size, i) for i, size in enumerate(shown)]
    config = a.tools_agent([f"{file}:page"], max_observation_tokens=200)
    (group,), asked = played(vision, config, ask_once(call_text("page")), pictures)
    (rollout,) = group.rollouts
    first, second = rollout.turns or []
    assert first.images == [] and len(second.images) == 1
    assert decode_png(second.images[0]).size == (20, 24)
    own = image_count(vision, group.prompt_ids)
    new = vision.num_tokens((20, 24))
    assert image_count(vision, second.prompt_ids) == new > 0
    assert second.observation[0]["content"] == "left [image] right"
    got = vision.tokenizer.decode(second.prompt_ids)
    assert got.index("left ") < got.index("<|image_pad|>") < got.index(" right")
    media = asked[1].media
    assert media is not None and len(media.images) == len(shown) + 1
    # The engine is sent one placeholder for each image, and expands them to the same ids.
    assert media.prompt_ids == asked[1].prompt_ids and image_count(vision, media.plain_ids) == (
        len(shown) + 1
    )
    plain = vision.tokenizer.decode(media.plain_ids)
    sizes = [image.size for image in media.images]
    assert vision.expand_prompt(plain, sizes) == asked[1].prompt_ids
    assert image_count(vision, asked[1].prompt_ids) == own + new
    assert sum(part.num_features for part in media.parts) == own + new


def test_an_image_that_is_a_tools_whole_answer_is_scaled_to_the_runs_limit(
    tmp_path: Path, vision: Any
) -> None:
    config = a.tools_agent([f"{write_file(tmp_path, TOOLS)}:square"], max_observation_tokens=200)
    (group,), _ = played(
        vision, config, ask_once(call_text("square", side=64)), images=ToolImages(None, 400)
    )
    assert decode_png(group.rollouts[0].turns[1].images[0]).size == (20, 20)  # type: ignore[index]


def test_an_image_with_more_tokens_than_are_left_is_left_out_and_says_so(
    tmp_path: Path, vision: Any
) -> None:
    config = a.tools_agent([f"{write_file(tmp_path, TOOLS)}:page"], max_observation_tokens=8)
    (group,), _ = played(vision, config, ask_once(call_text("page")))
    second = (group.rollouts[0].turns or [])[1]
    assert second.images == [] and "left out" in second.observation[0]["content"]


@pytest.mark.parametrize(
    ("tool", "says"),
    [("broken", "not an image"), ("path", "data: URL")],
    ids=["broken", "path"],
)
def test_what_is_no_image_is_an_error_of_the_tool(
    tmp_path: Path, vision: Any, tool: str, says: str
) -> None:
    config = a.tools_agent([f"{write_file(tmp_path, TOOLS)}:{tool}"], max_observation_tokens=200)
    (group,), _ = played(vision, config, ask_once(call_text(tool)))
    (rollout,) = group.rollouts
    assert says in (rollout.turns or [])[1].observation[0]["content"]
    assert rollout.episode_facts["errors"] == 1  # type: ignore[index]


def test_where_images_cannot_be_shown_a_tool_is_told_the_reason(
    tmp_path: Path, vision: Any
) -> None:
    config = a.tools_agent([f"{write_file(tmp_path, TOOLS)}:page"], max_observation_tokens=200)
    why = ToolImages("because algorithm=ppo")
    (group,), _ = played(vision, config, ask_once(call_text("page")), images=why)
    said = (group.rollouts[0].turns or [])[1].observation[0]["content"]
    assert "because algorithm=ppo" in said


@pytest.mark.parametrize("shown", [(), ((20, 24),)], ids=["text", "an image"])
def test_an_environments_reset_may_show_an_image_which_is_its_own_episodes(
    tmp_path: Path, vision: Any, shown: Any
) -> None:
    config = a.class_agent(
        {"room": f"{write_file(tmp_path, TOOLS)}:Room"}, max_observation_tokens=200
    )
    pictures = [v.picture(*size) for size in shown]
    (group,), asked = played(vision, config, lambda *_: "done", pictures, k=2, colour=9)
    own = image_count(vision, v.media(vision, pictures)[0])
    assert image_count(vision, group.prompt_ids) == own  # siblings' images may be others
    for rollout in group.rollouts:
        (turn,) = rollout.turns or []
        assert len(turn.images) == 1
        assert image_count(vision, turn.prompt_ids) == vision.num_tokens((16, 16))
        assert not any(rollout.mask[: len(turn.prompt_ids)])  # type: ignore[index]
    for one in asked:
        assert one.media is not None and len(one.media.images) == len(shown) + 1
        assert one.media.prompt_ids == one.prompt_ids


def test_a_template_that_leaves_a_tools_images_out_is_noticed(vision: Any) -> None:
    tokenizer = v.fresh("qwen2_5_vl")[1].tokenizer
    renderer = TurnRenderer(tokenizer, {}, {tokenizer.eos_token_id}, vision)
    assert renderer.shows_images([])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert not renderer.shows_images([])
    assert not TurnRenderer(tokenizer, {}, {tokenizer.eos_token_id}).shows_images([])


@pytest.mark.parametrize(
    "parts", [7, [7], [{}], [{"type": "text", "size": 1}], [{"type": "image", "file": "?"}]]
)
def test_an_answer_in_another_form_is_an_error_of_the_tool(parts: Any) -> None:
    assert "error" in ToolImages().read_answer({"parts": parts})
