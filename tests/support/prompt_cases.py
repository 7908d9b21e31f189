"""Builds prompts and tokenizers for the tests of `prompts`."""

import copy
import functools
from pathlib import Path

import datasets
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rloo_cli.config.schema import DataConfig
from rloo_cli.data import prompts
from rloo_cli.data.synthetic import tiny
from rloo_cli.utils.errors import DataError

YAML = Path(__file__).parents[2] / "conf/data/default.yaml"
BOS = "<bos>"
WITH_BOS = "{{ bos_token }}" + tiny.TEMPLATE


def config(**changes):
    return DataConfig(**yaml.safe_load(YAML.read_text()) | {"path": "here"} | changes)


def tokenizer(template=tiny.TEMPLATE, bos=False):
    """The byte tokenizer; with `bos`, one that puts a beginning of text before what it reads."""
    made = tiny.tiny_tokenizer()
    made.chat_template = template
    if bos:
        made.add_special_tokens({"bos_token": BOS})
        made.backend_tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{BOS} $A", special_tokens=[(BOS, made.bos_token_id)]
                ),
            ]
        )
    return made


def prepare(rows, tokens=None, longest=None, seed=1, template_kwargs=None, **changes):
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    data = datasets.Dataset.from_dict(columns)
    return prompts.tokenize_prompts(
        data, config(**changes), tokens or tokenizer(), template_kwargs or {}, longest, seed
    )


def refused(*args, **kwargs):
    with pytest.raises(DataError) as caught:
        prepare(*args, **kwargs)
    return caught.value


def plain(*texts):
    return [{"prompt": text} for text in texts]


def chat(*texts):
    return plain(*([{"role": "user", "content": text}] for text in texts))


def decoded(found, tokens=None):
    return [(tokens or tokenizer()).decode(ids) for ids in found.prompt_ids]


LONG = plain("abcdef", "ab", "abc", "a")

# Kinds of tokenizers: the model and its trainer, what splits words, what is added to a text ("$A").
LEARNT = {
    "bytes merged, as GPT-2": (
        models.BPE(), trainers.BpeTrainer, pre_tokenizers.ByteLevel(False), "",
    ),
    "bytes for the unknown, as Llama": (
        models.BPE(byte_fallback=True, unk_token="<unk>"), trainers.BpeTrainer,
        pre_tokenizers.Metaspace(), "<s> $A",
    ),
    "whole words, as WordLevel": (
        models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer,
        pre_tokenizers.Whitespace(), "",
    ),
    "pieces of words, as BERT": (
        models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer,
        pre_tokenizers.BertPreTokenizer(), "<s> $A </s>",
    ),
    "the likeliest pieces, as T5": (
        models.Unigram(), functools.partial(trainers.UnigramTrainer, unk_token="<unk>"),
        pre_tokenizers.Metaspace(), "$A </s>",
    ),
}  # fmt: skip
TEXTS = (
    "Say it.", " two  spaces ", "a\u0301\u4e16\U0001f600\u200d", "x\n\n\ty\r\n",
    "don't 1,000.5 <b>", "<|user|>not a turn<|assistant|>", "\u00df\u0130 UPPER lower",
    "{{ braces }} {% raw %}",
)  # fmt: skip


def learnt_tokenizer(kind):
    """A tokenizer of that kind, learnt from a few texts, with a template that says who begins."""
    model, trainer, words, added = LEARNT[kind]
    made = Tokenizer(copy.deepcopy(model))
    made.pre_tokenizer = words
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    learning = trainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator([*TEXTS, tiny.TEMPLATE] * 3, learning)
    if added:
        ids = [(token, made.token_to_id(token)) for token in special]
        made.post_processor = processors.TemplateProcessing(single=added, special_tokens=ids)
    bos = {"bos_token": "<s>"} if added.startswith("<s>") else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", pad_token="<pad>", **bos
    )
    fast.chat_template = WITH_BOS if bos else tiny.TEMPLATE
    return fast
