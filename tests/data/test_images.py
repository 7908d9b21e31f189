"""Images of prompts: how they are read, which are refused, and what becomes of a prompt's ids."""

import base64
import io
import json
import struct
import zlib

import datasets
import numpy as np
import pytest
import vision_cases as v
from assert_refused import assert_refused
from PIL import Image
from prompt_cases import config

from rloo_cli.data import image_prompts, images, prompts
from rloo_cli.data.images import BadImage, ImageReader
from rloo_cli.utils.errors import DataError


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.fixture(scope="module")
def vision():
    return v.fresh("qwen2_5_vl")[1]


def prepare(rows, vision, longest=None, **changes):
    data = datasets.Dataset.from_list(rows)
    return prompts.tokenize_prompts(
        data, config(**changes), vision.tokenizer, {}, longest, 1, load_vision=lambda: vision
    )


def asked(text="what?", **columns):
    return {"prompt": [{"role": "user", "content": text}], **columns}


RED = Image.new("RGB", (24, 16), (200, 10, 10))


def test_a_path_bytes_a_pil_image_and_a_data_url_are_one_image(tmp_path):
    (tmp_path / "red.png").write_bytes(encoded(RED))
    reader = ImageReader(tmp_path)
    url = "data:image/png;base64," + base64.b64encode(encoded(RED)).decode()
    forms = ("red.png", str(tmp_path / "red.png"), encoded(RED), RED, url)
    dicts = ({"bytes": encoded(RED), "path": None}, {"bytes": None, "path": "red.png"})
    for source in (*forms, *dicts):
        found = reader.read_image(source)
        assert found.mode == "RGB" and found.tobytes() == RED.tobytes()


def test_a_url_is_fetched_only_if_the_config_says_so(tmp_path, monkeypatch):
    with pytest.raises(BadImage, match="allow_remote_images"):
        ImageReader(tmp_path).read_image("https://example.org/a.png")
    monkeypatch.setattr(images, "fetch_web_file", lambda *_: encoded(RED))
    found = ImageReader(tmp_path, allow_remote=True).read_image("https://example.org/a.png")
    assert found.size == RED.size


def test_transparency_becomes_white_and_gray_becomes_colour(tmp_path):
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert ImageReader(tmp_path).read_image(clear).getpixel((0, 0)) == (255, 255, 255)
    assert ImageReader(tmp_path).read_image(Image.new("L", (4, 4), 7)).getpixel((0, 0)) == (7, 7, 7)


def test_larger_images_are_scaled_to_max_pixels_in_their_proportions(tmp_path):
    found = ImageReader(tmp_path, max_pixels=100).read_image(Image.new("RGB", (40, 10)))
    assert found.size == (20, 5)


def bomb(side=60_000):
    """A PNG whose header says that it has so many pixels on each side."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return (b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(head)) + chunk
            + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IEND\xaeB`\x82")  # fmt: skip


NOISE = encoded(v.picture(64, 64))
FRAMES = [v.picture(8, 8, seed) for seed in range(3)]
BAD = {
    "truncated": (NOISE[: len(NOISE) // 2], "truncated"),
    "a text file": (b"This is no picture.", "its 19 bytes"),
    "a bomb": (bomb(), "3600000000 pixels"),
    "huge": (bomb(9_000), "9000 x 9000 pixels"),  # Pillow would decode it
    "animated": (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "animated: 3"),
    "a mode without colours": (
        encoded(Image.fromarray(np.zeros((4, 4), np.int32)), "TIFF"), "its mode is I"
    ),
    "one row of pixels": (encoded(Image.new("RGB", (2000, 1))), "aspect ratio"),
    "empty": (b"", "missing|empty"),
    "missing": ("nowhere.png", r"nowhere\.png"),
}  # fmt: skip


@pytest.mark.parametrize("source, why", BAD.values(), ids=BAD)
def test_a_bad_image_is_refused_with_its_reason(source, why, tmp_path):
    with pytest.raises(BadImage, match=why):
        ImageReader(tmp_path).read_image(source)


def test_a_bad_image_ends_the_run_or_its_row_is_left_out_and_counted(tmp_path, vision, sentence):
    (tmp_path / "red.png").write_bytes(encoded(RED))
    (tmp_path / "half.png").write_bytes(NOISE[:400])
    names = ["red.png", "half.png", "red.png"]
    rows = [asked(f"{i}", image=name, answer=i) for i, name in enumerate(names)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as caught:
        prepare(rows, vision, path=str(path))
    assert_refused(caught, 4, "1 of 3", where="row 1", fix="data.on_bad_image=filter")
    sentence(caught)
    found = prepare(rows, vision, path=str(path), on_bad_image="filter")
    assert found.bad_images == 1 and [e["answer"] for e in found.examples] == [0, 2]
    with pytest.raises(DataError) as caught:
        prepare(rows[1:2], vision, path=str(path), on_bad_image="filter")
    assert_refused(caught, 4, "1 of 1", where="row 0")


def test_ids_are_those_of_the_models_own_processor(vision):
    shown = [[v.picture(20, 24)], [v.picture(16, 16, 1), v.picture(40, 20, 2)], []]
    found = prepare([asked(images=one) for one in shown], vision)
    for i, one in enumerate(shown):
        group = found.group_of(i)
        parts = [{"type": "image"}] * len(one) + [{"type": "text", "text": "what?"}]
        text = vision.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        own = vision.processor(images=[one] if one else None, text=[text])["input_ids"][0]
        assert group.prompt_ids == list(own)
        assert (group.media is not None) == bool(one)
        assert found.prompts[i] == [{"role": "user", "content": parts}]


def test_images_of_messages_and_of_the_column_meet_in_the_order_of_the_parts(vision, sentence):
    text = {"type": "text", "text": "and"}
    content = [{"type": "image"}, text, {"type": "image", "image": "b"}, {"type": "image"}]
    message = [{"role": "user", "content": content}]
    given, found = image_prompts.take_images(message, ["a", "c"], "here")
    assert found == ["a", "b", "c"]
    assert given[0]["content"] == [{"type": "image"}, text, {"type": "image"}, {"type": "image"}]
    openai = [{"type": "image_url", "image_url": {"url": "data:x"}}, text]
    assert image_prompts.take_images([{"role": "user", "content": openai}], [], "here")[1] == [
        "data:x"
    ]
    for asking, fix in ((message, "2 images"), ([{"role": "system", "content": "x"}], "user")):
        with pytest.raises(DataError) as caught:
            image_prompts.take_images(asking, ["a"], "here")
        assert_refused(caught, 4, where="here", fix=fix)
        sentence(caught)


def test_the_column_of_images_is_not_among_the_plain_columns(vision):
    found = prepare([asked(image=RED, answer="red")], vision)
    assert found.examples == [{"answer": "red"}]


def test_other_pixels_are_another_data_set(vision):
    one, other = (
        prepare([asked(image=v.picture(16, 16, seed))], vision).fingerprint for seed in (1, 2)
    )
    assert one != other
    assert one == prepare([asked(image=v.picture(16, 16, 1))], vision).fingerprint


def test_plain_text_with_images_needs_a_chat_template(vision, sentence):
    with pytest.raises(DataError) as caught:
        prepare([{"prompt": "what?", "image": RED}], vision)
    assert_refused(caught, 4, "images", fix="data.chat=true")
    sentence(caught)
    found = prepare([{"prompt": "what?", "image": RED}], vision, chat=True)
    assert found.group_of(0).media is not None


def test_a_prompt_is_not_cut_within_its_images(vision, sentence):
    rows = [asked("x" * n, image=RED) for n in (1, 1, 40)]
    longest = max(map(len, prepare(rows[:2], vision).prompt_ids))
    with pytest.raises(DataError) as caught:
        prepare(rows, vision, longest, overlong="truncate_left")
    assert_refused(caught, 4, "image", where="data.overlong", fix="data.overlong=filter")
    sentence(caught)
    assert len(prepare(rows, vision, longest)) == 2


def test_a_template_that_shows_no_images_is_refused(vision, sentence):
    _, other = v.fresh("qwen2_5_vl")
    other.tokenizer.chat_template = "{{ messages[0]['content'][1]['text'] }}"
    with pytest.raises(DataError) as caught:
        prepare([asked(image=RED)], other)
    assert_refused(caught, 4, "0 images", where="model.chat_template")
    sentence(caught)


def test_an_image_that_changed_meanwhile_is_noticed(tmp_path, vision, sentence):
    (tmp_path / "a.png").write_bytes(encoded(RED))
    found = prepare([asked(image=str(tmp_path / "a.png"))], vision)
    (tmp_path / "a.png").write_bytes(encoded(v.picture(48, 48)))
    with pytest.raises(DataError) as caught:
        _ = found.group_of(0).media.tensors
    assert_refused(caught, 4, "34 then, 44", where="data.path")
    sentence(caught)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError) as caught:
        _ = found.group_of(0).media.images
    assert_refused(caught, 4, "a.png", where="data.path")
    sentence(caught)


def test_a_data_sets_pixels_are_not_kept(vision):
    found = prepare([asked(image=RED)], vision)
    assert found.group_of(0).media.tensors["pixel_values"].numel()
    assert "tensors" not in vars(found.media[0]) and "images" not in vars(found.media[0])
