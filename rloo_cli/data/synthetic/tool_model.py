"""The tiny models of the tasks in `tool_tasks`: made here, and shown a few ways to answer.

The model of products has seen two ways: most often a careless product without the calculator,
seldom a call whose answer is repeated. The model of the guessing game guesses somewhere in what
is still possible, or just anywhere. Both know how a call is written and what a tool answers;
which way is worth taking they learn by reinforcement. A call's frame is one token.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rloo_cli.data.cache import cached_folder, report_progress
from rloo_cli.data.synthetic import tool_tasks

PAD, EOS = "<pad>", "<eos>"
ROLES = ("<user>", "<assistant>", "<tool>")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
# Where numbers begin farther apart than by default, fewer steps tell them from each other.
GAME_SHAPE = SHAPE | {"initializer_range": 0.1}
# Every message ends with EOS, as those that the model writes do.
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>"
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PRODUCT_FRAME = ('<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
GAME_FRAME = ('<tool_call>{"name": "guess", "arguments": {"number": ', "}}</tool_call>")
PRODUCT_WORDS = [*"0123456789*=", *PRODUCT_FRAME]
GAME_WORDS = [*(str(n) for n in range(tool_tasks.HIGHEST_SECRET, 0, -1)), "-", "?"]
GAME_WORDS += ["higher", "lower", "right", *GAME_FRAME]
CALLS = 0.25  # share of the products that are shown with a call
REPEATED = 0.5  # share of the products that teach nothing but to repeat the answer
CAREFUL = 0.5  # share of the guesses that lie in what is still possible
BATCH, RATE = 64, 3e-3
PRODUCT_STEPS, GAME_STEPS = 600, 800  # repeating digits, and comparing numbers, take long

Segment = tuple[str, bool]  # a text, and whether the model wrote it


def tool_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each of these words, for roles, and for a text's ends."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *ROLES, *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = Fuse()
    plain.add_tokens([AddedToken(w, normalized=False) for w in words if len(w) > 1])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token=PAD, eos_token=EOS, additional_special_tokens=[*ROLES]
    )
    fast.chat_template = TEMPLATE
    return fast


def product_model_folder() -> Path:
    """The folder of the model of products."""
    return _cached_model("products", SHAPE, PRODUCT_WORDS, _product_answer, PRODUCT_STEPS)


def game_model_folder() -> Path:
    """The folder of the model of the guessing game."""
    return _cached_model("game", GAME_SHAPE, GAME_WORDS, _game_played, GAME_STEPS)


def _cached_model(
    name: str,
    shape: dict[str, Any],
    words: list[str],
    show: Callable[[random.Random], list[Segment]],
    steps: int,
) -> Path:
    def make(folder: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tokenizer = tool_tokenizer(words)
            config = Qwen3Config(
                vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape,
            )  # fmt: skip
            model = Qwen3ForCausalLM(config)
            _train_supervised(model, tokenizer, show, steps)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    recipe = (
        f"{name}-{words}-{shape}-{TEMPLATE}-{CALLS}-{REPEATED}-{CAREFUL}-{BATCH}-{RATE}-{steps}"
    )
    return cached_folder(name, recipe, make)


def _product_answer(draw: random.Random) -> list[Segment]:
    """A product with the calculator's answer, or with the product of the factors' tens.

    Half of them only show that a calculator's answer is repeated, and not when to ask for it.
    """
    a, b = draw.choice(_train_products())
    asked: Segment = (f"<user>{a}*{b}=<eos><assistant>", False)
    shows_repeating = draw.random() < REPEATED
    if not shows_repeating and draw.random() >= CALLS:
        return [asked, (f"{a // 10 * (b // 10) * 100}<eos>", True)]
    head, between, tail = PRODUCT_FRAME
    call: Segment = (f"{head}{a}{between}{b}{tail}<eos>", not shows_repeating)
    return [asked, call, (f"<tool>{a * b}<eos><assistant>", False), (f"{a * b}<eos>", True)]


def _game_played(draw: random.Random) -> list[Segment]:
    """A game, some of whose guesses are careful."""
    low, high = draw.choice(_train_ranges())
    secret, possible = draw.randint(low, high), (low, high)
    shown: list[Segment] = [(f"<user>{low}-{high}?<eos><assistant>", False)]
    head, tail = GAME_FRAME
    for _ in range(tool_tasks.GUESSES):
        number = draw.randint(*(possible if draw.random() < CAREFUL else (low, high)))
        shown.append((f"{head}{number}{tail}<eos>", True))
        if number == secret:
            break
        above = secret > number
        possible = (max(possible[0], number + 1), possible[1]) if above else (
            possible[0], min(possible[1], number - 1))  # fmt: skip
        shown.append((f"<tool>{'higher' if above else 'lower'}<eos><assistant>", False))
    return shown


def _train_products() -> list[tuple[int, int]]:
    _PAIRS["products"] = _PAIRS.get("products") or tool_tasks.product_pairs("train")
    return _PAIRS["products"]


def _train_ranges() -> list[tuple[int, int]]:
    _PAIRS["ranges"] = _PAIRS.get("ranges") or tool_tasks.game_ranges("train")
    return _PAIRS["ranges"]


_PAIRS: dict[str, list[tuple[int, int]]] = {}


def _train_supervised(
    learner: Qwen3ForCausalLM,
    tokens: PreTrainedTokenizerFast,
    show: Callable[[random.Random], list[Segment]],
    steps: int,
) -> None:
    """Train on what `show` draws; only what the model wrote is learned."""
    draw = random.Random(0)
    known: dict[str, list[int]] = {}  # few texts come often
    optimizer = torch.optim.AdamW(learner.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / 20, (steps - step + 1) / 100)
        rows = [_labelled(show(draw), tokens, known) for _ in range(BATCH)]
        width, pad = max(len(ids) for ids, _ in rows), tokens.pad_token_id
        batch = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([own + [-100] * (width - len(own)) for _, own in rows])
        loss = learner(input_ids=batch, attention_mask=(batch != pad).long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            report_progress(f"{step / steps:.0%}, step {step} of {steps}")


def _labelled(
    segments: list[Segment], tokens: PreTrainedTokenizerFast, known: dict[str, list[int]]
) -> tuple[list[int], list[int]]:
    """Ids, and the labels of what the model wrote."""
    ids: list[int] = []
    labels: list[int] = []
    for text, own in segments:
        if text not in known:
            known[text] = tokens(text, add_special_tokens=False)["input_ids"]
        new = known[text]
        ids += new
        labels += new if own else [-100] * len(new)
    return ids, labels
