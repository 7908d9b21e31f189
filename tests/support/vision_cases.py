"""Tiny random vision-language models of every family, made offline, and groups that show images."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers as T
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rloo_cli.config.vision_models import VISION_FAMILIES
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.images import ImageReader
from rloo_cli.data.media import Media
from rloo_cli.data.vision_processor import VisionProcessor, without_video_part

TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048, "bos_token_id": None,
    "initializer_range": 0.2,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
SQUARE = {"height": 16, "width": 16}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}"
    "{{ p['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FAMILY_NAMES = (*VISION_FAMILIES,)


def byte_tokenizer(special, named, placeholder):
    """A token per byte, and these special ones; `named`: attributes that a processor reads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<eos>", *special, *alphabet]
    plain = Tokenizer(models.BPE({t: i for i, t in enumerate(words)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    fast = T.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=named
    )
    fast.add_special_tokens({"extra_special_tokens": special}, replace_extra_special_tokens=False)
    fast.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    return fast


def _text(tokens, **more):
    end = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    return TEXT | end | {"vocab_size": len(tokens)} | more


def _qwen(two):
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokens = byte_tokenizer(names, {}, "<|vision_start|><|image_pad|><|vision_end|>")
    start, end, image, video = tokens.convert_tokens_to_ids(names)
    tower = {"depth": 2, "num_heads": 2, "patch_size": 4, "initializer_range": 0.2}
    if two:
        tower |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        tower |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64,
                  "window_size": 16, "fullatt_block_indexes": [1]}  # fmt: skip
    config = (T.Qwen2VLConfig if two else T.Qwen2_5_VLConfig)(
        text_config=_text(tokens, rope_parameters={
            "rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}),
        vision_config=tower, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    images = T.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, min_pixels=64, max_pixels=64 * 16
    )
    kind = T.Qwen2VLProcessor if two else T.Qwen2_5_VLProcessor
    model = T.Qwen2VLForConditionalGeneration if two else T.Qwen2_5_VLForConditionalGeneration
    return model, config, without_video_part(kind)(image_processor=images, tokenizer=tokens)


def _gemma3():
    names = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    named = dict(zip(("image_token", "boi_token", "eoi_token"), names, strict=True))
    tokens = byte_tokenizer(names, named, "<start_of_image>")
    image, begin, end = tokens.convert_tokens_to_ids(names)
    tokens.add_tokens(["\n" * count for count in (1, 2, 3, 4)])  # Gemma's tokenizer has them
    config = T.Gemma3Config(
        text_config=_text(tokens, head_dim=32, sliding_window=512, query_pre_attn_scalar=32),
        vision_config=TOWER, mm_tokens_per_image=4, image_token_index=image,
        boi_token_index=begin, eoi_token_index=end,
    )  # fmt: skip
    images = T.Gemma3ImageProcessorPil(size=SQUARE)
    process = T.Gemma3Processor(images, tokens, image_seq_length=4)
    return T.Gemma3ForConditionalGeneration, config, process


def _llava_next():
    tokens = byte_tokenizer(["<image>"], {"image_token": "<image>"}, "<image>")
    config = T.LlavaNextConfig(
        text_config=_text(tokens, model_type="llama"),
        vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=PINPOINTS, vision_feature_layer=-1,
    )  # fmt: skip
    images = T.LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS
    )
    process = T.LlavaNextProcessor(
        images, tokens, patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    return T.LlavaNextForConditionalGeneration, config, process


def _idefics3(smol=False):
    tiles = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    names = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokens = byte_tokenizer(names, {}, "<image>")
    config = (T.SmolVLMConfig if smol else T.Idefics3Config)(
        text_config=_text(tokens, model_type="llama"), vision_config=TOWER, scale_factor=2,
        image_token_id=tokens.convert_tokens_to_ids("<image>"), pad_token_id=tokens.pad_token_id,
    )  # fmt: skip
    kind = T.SmolVLMImageProcessorPil if smol else T.Idefics3ImageProcessorPil
    images = kind(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    process = T.Idefics3Processor(images, tokens, image_seq_len=4)
    model = T.SmolVLMForConditionalGeneration if smol else T.Idefics3ForConditionalGeneration
    return model, config, process


def _internvl():
    names = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    keys = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    tokens = byte_tokenizer(names, dict(zip(keys, names, strict=True)), "<IMG_CONTEXT>")
    config = T.InternVLConfig(
        text_config=_text(tokens, model_type="qwen2"),
        vision_config=TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=tokens.convert_tokens_to_ids("<IMG_CONTEXT>"), image_seq_length=4,
        downsample_ratio=0.5,
    )  # fmt: skip
    images = T.GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, max_patches=4)
    process = without_video_part(T.InternVLProcessor)(images, tokens, image_seq_length=4)
    return T.InternVLForConditionalGeneration, config, process


MAKERS = {
    "qwen2_5_vl": lambda: _qwen(False), "qwen2_vl": lambda: _qwen(True), "gemma3": _gemma3,
    "llava_next": _llava_next, "idefics3": _idefics3, "internvl": _internvl,
    "smolvlm": lambda: _idefics3(True),
}  # fmt: skip


def fresh(name):
    """A random model of one's own, and its processor."""
    torch.manual_seed(0)
    kind, config, process = MAKERS[name]()
    process.chat_template = process.tokenizer.chat_template
    model = kind(config).eval()
    with torch.no_grad():  # Gemma's connector begins with a weight of zeros
        for weight in model.parameters():
            if weight.ndim > 1 and not weight.any():
                weight.normal_(std=0.2)
    family = VISION_FAMILIES[name]
    return model, VisionProcessor(process, process.tokenizer, family, config.image_token_id)


@functools.cache
def folder(name):
    """The folder of a random model, for this session."""
    root = Path(tempfile.mkdtemp(prefix=f"rloo-{name}-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    model, vision = fresh(name)
    model.save_pretrained(root)
    vision.processor.save_pretrained(root)
    return root


def picture(width, height, seed=0):
    """Noise of this size."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def media(vision, images, text="what?"):
    """A rendered prompt with these images; None for none. -> its ids, the media"""
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
    rendered = vision.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    ids = vision.expand_prompt(rendered, [image.size for image in images])
    shown = Media(list(images), "images", rendered, ids, ImageReader(Path()), vision)
    return ids, shown if images else None


def groups(vision, shown=None, lengths=((3, 5), (4, 1), (2, 6))):
    """Groups that show 1, 0 and 2 images of unequal sizes, with completions of these lengths."""
    draw = torch.Generator().manual_seed(3)
    if shown is None:
        shown = ((picture(20, 24),), (), (picture(16, 16, 1), picture(40, 20, 2)))
    first = len(vision.tokenizer) - 200  # bytes: no id that means an image

    def ids(count):
        return (first + torch.randint(200, (count,), generator=draw)).tolist()

    found = []
    for i, (images, of_group) in enumerate(zip(shown, lengths, strict=True)):
        prompt, one = media(vision, images, f"what {i}?")
        rollouts = [Rollout(ids(n), "", "stop", True, 0, 0) for n in of_group]
        found.append(Group(i, {}, "", prompt, rollouts, media=one))
    return found


SHOWN = (1, 0, 2, 1, 0, 1, 2, 1)  # images of each prompt of `rows_file`


def rows_file(root, shown=SHOWN):
    """A data set with so many images in each row, of unequal sizes, as files beside it."""
    root.mkdir(parents=True, exist_ok=True)
    lines, number = [], 0
    for i, count in enumerate(shown):
        names = []
        for _ in range(count):
            names.append(f"{number}.png")
            picture(16 + 4 * (number % 5), 16 + 8 * (number % 3), number).save(root / names[-1])
            number += 1
        prompt = [{"role": "user", "content": f"what {'is that ' * (i % 3)}{i}?"}]
        lines.append(json.dumps({"prompt": prompt, "images": names, "answer": str(i)}) + "\n")
    (root / "rows.jsonl").write_text("".join(lines))
    return root / "rows.jsonl"


def run_words(name, file):
    """Overrides of the smoke recipe: this family's model, and the rows of `file`."""
    return (
        f"model.path={folder(name)}", "data=default", f"data.path={file}", "data.eval_split=null",
        "data.max_prompt_length=256", "train.prompts_per_step=4",
    )  # fmt: skip
