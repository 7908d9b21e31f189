"""The tiny vision-language model of the task in `pictures`, a Qwen2.5-VL that is made here.

It has been shown that the question is answered with the name of a colour, any of them: to look at
the picture is what reinforcement has to teach it.
"""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

from rloo_cli.data.cache import cached_folder, report_progress
from rloo_cli.data.synthetic import pictures
from rloo_cli.data.vision_processor import without_video_part

PAD, EOS = "<pad>", "<eos>"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ROLES = ("<user>", "<assistant>")
WORDS = (*pictures.COLOURS, pictures.QUESTION)
TEXT_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.1,
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0
    },
}  # fmt: skip
TOWER_SHAPE: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [0],
    "initializer_range": 0.1,
}  # fmt: skip
IMAGE = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
STEPS, BATCH, RATE = 300, 16, 3e-3  # so many that no other token is left


def vision_model_folder() -> Path:
    """The folder of the model."""

    def make(folder: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tokenizer = picture_tokenizer()
            model = Qwen2_5_VLForConditionalGeneration(picture_config(tokenizer))
            processor = without_video_part(Qwen2_5_VLProcessor)(
                image_processor=Qwen2VLImageProcessorPil(**IMAGE), tokenizer=tokenizer,
                chat_template=TEMPLATE,
            )  # fmt: skip
            _show_answers(model, processor)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)

    shape = f"{WORDS}-{TEXT_SHAPE}-{TOWER_SHAPE}-{IMAGE}-{TEMPLATE}-{STEPS}-{BATCH}-{RATE}"
    return cached_folder("vision", shape, make)


def picture_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each colour and the question, for roles, and for images."""
    special = [PAD, EOS, *VISION, *ROLES]
    vocabulary = {token: i for i, token in enumerate([*special, *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = Fuse()
    plain.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=PAD, eos_token=EOS)
    fast.add_special_tokens({"additional_special_tokens": [*VISION, *ROLES]})
    fast.chat_template = TEMPLATE
    return fast


def picture_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """The config of the model with this tokenizer."""
    start, end, image, video = tokenizer.convert_tokens_to_ids([*VISION])
    text = TEXT_SHAPE | {
        "vocab_size": len(tokenizer), "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=TOWER_SHAPE, image_token_id=image, video_token_id=video,
        vision_start_token_id=start, vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip


def _show_answers(model: Qwen2_5_VLForConditionalGeneration, processor: Any) -> None:
    """Train on pictures with the name of any colour for an answer."""
    draw, names = random.Random(0), list(pictures.COLOURS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    content = [{"type": "image"}, {"type": "text", "text": pictures.QUESTION}]
    asked = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    first, count = pictures.SPLITS["train"]
    for step in range(1, STEPS + 1):
        shown = [
            pictures.draw_picture(draw.randrange(first, first + count), draw.choice(names))
            for _ in range(BATCH)
        ]
        texts = [f"{asked}{draw.choice(names)}{EOS}" for _ in shown]
        inputs = processor(images=[[image] for image in shown], text=texts, return_tensors="pt")
        labels = inputs["input_ids"].clone()
        labels[:, :-2] = -100  # the answer is a name and an end
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            report_progress(f"{step / STEPS:.0%}, step {step} of {STEPS}")
