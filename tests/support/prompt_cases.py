"""Builds prompts and tokenizers for the tests of `prompts`."""

from pathlib import Path

import datasets
import pytest
import yaml
from tokenizers import processors

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
