"""How long a prompt may be where nothing says it: data, engine and plan have one answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from loop_cases import checked, make
from policy_cases import fresh
from transformers import PreTrainedTokenizerBase

from rloo_cli.config import prompt_limit
from rloo_cli.config.schema import RunConfig
from rloo_cli.data import splits
from rloo_cli.data.synthetic import tiny
from rloo_cli.generation.vllm import arguments
from rloo_cli.planning import device, plan_inputs
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import DataError

COMPLETION = 16  # of the smoke recipe
SERVER = "generation=vllm_server"
BOUND = "generation.server.max_model_len"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny.tiny_tokenizer()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Prompts of 10, 100, 1000 and 10,000 tokens, thrice the shortest."""
    path = tmp_path / "rows.jsonl"
    prompts = ["x" * n for n in (10, 10, 10, 100, 1000, 10_000)]
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return path


def model(folder: Path, context: int | None) -> str:
    """What `model.path` is for a model of this context, as far as a config and a plan look."""
    folder = folder / f"model-{context}"
    folder.mkdir(exist_ok=True)
    shape = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    shape |= {"intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"max_position_embeddings": context} if context else {}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").touch()
    return f"model.path={folder}"


def three_limits(run: RunConfig, context: int | None, rows: int, tokenizer: Any) -> list[int]:
    """Tokens of the longest prompt: of the data, of a vLLM engine, of a plan."""
    prompts = splits.tokenize_splits(run, splits.open_splits(run), tokenizer, context)[None]
    assert len(prompts) == rows, "the data keeps what fits, and counts the rest"
    keys = run.generation.server  # type: ignore[attr-defined]
    engine = arguments.engine_max_model_len(run, keys)
    plan = plan_inputs.collect_plan_inputs(run, device.find_device("80GiB"), 1).max_prompt_tokens
    assert prompts.dropped == 6 - rows
    return [*prompts.length_limits, (engine or 0) - COMPLETION, plan]


@pytest.mark.parametrize(
    ("context", "words", "limit", "kept"),
    [
        (512, [], 512 - COMPLETION, 4),
        (2048, [], 2048 - COMPLETION, 5),
        (131_072, [], prompt_limit.DEFAULT_MAX_PROMPT_TOKENS, 5),
        (131_072, ["data.max_prompt_length=20000"], 20_000, 6),  # said, it may be larger
        (2048, ["data.max_prompt_length=50"], 50, 3),
        (131_072, [f"{BOUND}=116"], 100, 4),  # vLLM would refuse what is longer
        (64, [f"{BOUND}=300"], 48, 3),
    ],
)
def test_data_engine_and_plan_take_the_same_longest_prompt(
    tmp_path: Path, rows: Path, tokenizer: Any, context: int, words: list[str], limit: int,
    kept: int,
) -> None:  # fmt: skip
    more = (SERVER, model(tmp_path, context), f"data.path={rows}", "data.eval_split=null")
    run = checked((), (*more, *words))
    data, engine, plan = three_limits(run, context, kept, tokenizer)
    assert data == plan == limit
    assert engine == (run.generation.server.max_model_len or limit + COMPLETION) - COMPLETION  # type: ignore[attr-defined]


def test_a_held_out_set_is_bounded_by_the_engine_too(rows: Path, tokenizer: Any) -> None:
    long = f"eval.sets={{long: {{path: {rows}, split: train, max_prompt_length: 1000}}}}"
    run = checked((), (SERVER, f"{BOUND}=200", "data.max_prompt_length=150", long))
    found = splits.tokenize_splits(run, splits.open_splits(run), tokenizer, 2048)["long"]
    assert (len(found), found.dropped, found.length_limits) == (4, 2, [200 - COMPLETION])


def test_a_context_nobody_knows_leaves_the_default_limit(tmp_path: Path, tokenizer: Any) -> None:
    run = checked((), (SERVER, model(tmp_path, None), "data.path=make:tiny"))
    assert (
        plan_inputs.collect_plan_inputs(run, device.find_device("80GiB"), 1).max_prompt_tokens
        == prompt_limit.DEFAULT_MAX_PROMPT_TOKENS
    )
    assert splits.tokenize_splits(run, splits.open_splits(run), tokenizer, None)[
        None
    ].length_limits == [4096]
    # An engine may know of a shorter one, and would refuse a longer one than it knows.
    assert arguments.engine_max_model_len(run, run.generation.server) is None  # type: ignore[attr-defined]
    assert prompt_limit.DEFAULT_MAX_PROMPT_TOKENS == 4096


@pytest.mark.parametrize(
    ("words", "context", "limit"),
    [((), 512, 496), ((SERVER, f"{BOUND}=116"), 512, 100), ((), 131_072, 4096), ((), None, 4096)],
)
def test_the_log_says_what_null_became(
    words: tuple[str, ...], context: int | None, limit: int, tokenizer: Any,
    sentence: Callable[..., None],
) -> None:  # fmt: skip
    run = checked((), words)
    prompts = splits.tokenize_splits(run, splits.open_splits(run), tokenizer, context)
    first = splits.data_notes(run, prompts, context)[0]
    assert f"of up to {limit} tokens" in first
    sentence(first)
    said = checked((), (*words, "data.max_prompt_length=90"))
    assert "of up to" not in "".join(splits.data_notes(said, prompts, context))


def test_a_longer_prompt_than_the_room_is_answered_with_what_helps(
    rows: Path, tokenizer: Any
) -> None:
    run = checked((), (f"data.path={rows}", "data.eval_split=null", "data.overlong=error"))
    with pytest.raises(DataError) as caught:
        splits.tokenize_splits(run, splits.open_splits(run), tokenizer, 512)
    problem = assert_refused(caught, 4, key="496", fix="generation.max_completion_length")
    assert "data.max_prompt_length=" not in problem.fix
    with pytest.raises(DataError) as caught:
        splits.tokenize_splits(run, splits.open_splits(run), tokenizer, 131_072)
    assert_refused(caught, 4, fix="data.max_prompt_length=10000")


def test_a_model_of_512_tokens_trains_with_the_default_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh(vocab_size=len(tiny.tiny_tokenizer()), max_position_embeddings=512).save_pretrained(
        tmp_path / "m"
    )
    tiny.tiny_tokenizer().save_pretrained(tmp_path / "m")
    run = make(tmp_path, f"model.path={tmp_path}/m", "max_steps=1", "data.eval_split=null")
    run_training_loop(run)
    assert run.state.step == 1
    assert "up to 496 tokens" in capsys.readouterr().out
