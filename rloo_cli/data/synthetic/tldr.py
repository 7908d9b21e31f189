"""The TL;DR pipeline in miniature, made here: posts with summaries, and the initial model.

    make:tldr         examples: prompt, summary (by careless people); train, validation, test
    make:tldr_base    a random model of 0.3 M parameters, one token per word

`tldr_models` trains that model. `gold_score` is the hidden rule as a reward function,
for judging: nothing is trained on it.
"""

import hashlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.data.cache import cached_folder
from rloo_cli.data.synthetic import tldr_posts as posts
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:  # the examples are read without torch
    from transformers import PreTrainedTokenizerFast

SIZES = {"train": 6000, "validation": 200, "test": 1000}
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,  # the smallest that vLLM has kernels for without a GPU
    "max_position_embeddings": 128,
    "initializer_range": 0.1,  # with the usual 0.02 so narrow a model does not learn to copy
}
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def tldr_examples(split: str) -> list[JsonObject]:
    """Posts with a careless person's summary. No two splits share a post's facts."""
    return [_tldr_example(split, i) for i in range(SIZES[split])]


def _tldr_example(split: str, number: int) -> JsonObject:
    rng = random.Random(f"tldr/{split}/{number}")
    facts = posts.sample_facts(rng)
    while _split_of(facts) != split:
        facts = posts.sample_facts(rng)
    prompt = posts.write_post(facts, rng)
    return {"prompt": prompt, "summary": posts.write_reference_summary(facts, rng)}


def _split_of(facts: posts.Facts) -> str:
    """The split of a post with these facts: eight in ten are for training."""
    digit = hashlib.sha256(str(facts).encode()).digest()[0] % 10
    return "test" if digit == 0 else "validation" if digit == 1 else "train"


def gold_score(prompts: list[str], completions: list[str], **_: object) -> list[float | None]:
    """The hidden rule (`tldr_posts.score_summary`) as a reward function: a judge, or a metric.

    None if the prompt is not a post of make:tldr: the rule does not apply.
    """
    return [
        posts.score_summary(prompt, completion) if posts.is_post(prompt) else None
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def tldr_tokenizer() -> "PreTrainedTokenizerFast":
    """A tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    frames = [posts.HEAD, posts.END, posts.GLUE, *posts.CHAT]
    frames += [*posts.EVENT, *posts.FEELING, *posts.WISH, *posts.ASIDES]
    words = {w for frame in frames for w in frame.split() if "{" not in w} | {*posts.FACT_OF_WORD}
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(words)])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def tldr_base_folder() -> Path:
    """The folder of the random model that training starts from."""
    recipe = f"tldr_base-{SHAPE}-{sorted(tldr_tokenizer().get_vocab())}"
    return cached_folder("tldr_base", recipe, _make_base)


def _make_base(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tldr_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **SHAPE,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
