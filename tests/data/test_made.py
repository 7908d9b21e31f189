"""Models and data made on the spot, and the cache they are kept in."""

import os
import random

import numpy as np
import pytest
import torch
import transformers
from prompt_cases import config

from rloo_cli.config import synthetic
from rloo_cli.data import cache as data_cache
from rloo_cli.data.synthetic import addition, tiny, tldr, tool_model, tool_tasks, vision_model
from rloo_cli.data.synthetic import tldr_models as trained
from rloo_cli.utils.errors import MachineError

pytestmark = pytest.mark.wide

# The fetched model and its smaller brother have files of their own.
MODELS = sorted(set(synthetic.SYNTHETIC_MODELS) - {"smollm2", "smollm2_shallow"})


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and a class that reads for a moment only."""
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(addition, "LONGEST", 3)
    monkeypatch.setattr(tool_model, "PRODUCT_STEPS", 3)
    monkeypatch.setattr(tool_model, "GAME_STEPS", 3)
    monkeypatch.setattr(vision_model, "STEPS", 3)
    monkeypatch.setattr(tldr, "SIZES", {"train": 32, "validation": 4, "test": 8})
    monkeypatch.setattr(trained, "PAIRS_PER_SPLIT", {"train": 8, "test": 4})
    return tmp_path / "cache"


def test_held_out_problems_never_appear_in_training():
    train, test = addition.addition_problems()
    assert len(test) == 500 and len(train) == 7600
    assert len({*train, *test}) == 8100 and not {*train} & {*test}
    assert all(10 <= n <= 99 for pair in (*train, *test) for n in pair)


def test_the_problems_are_parted_alike_everywhere():
    assert addition.addition_examples("test")[:2] == [
        {"prompt": "49+95=", "answer": "144"},
        {"prompt": "56+74=", "answer": "130"},
    ]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_is_the_sum(split):
    for row in addition.addition_examples(split):
        a, b = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == addition.exact_sum(int(a), int(b)) == str(int(a) + int(b))


def test_the_careless_forget_every_carry():
    assert addition.sum_without_carry(47, 38) == "75"
    assert addition.sum_without_carry(41, 38) == "79"
    assert addition.sum_without_carry(60, 50) == "10"
    pairs = [pair for half in addition.addition_problems() for pair in half]
    right = sum(addition.exact_sum(*p) == addition.sum_without_carry(*p) for p in pairs)
    assert 0.1 < right / len(pairs) < 0.5


def test_a_problem_is_one_token_per_character_and_comes_back():
    tokens = addition.addition_tokenizer()
    for text in ("47+38=", "0123456789+=", "47+38=85"):
        ids = tokens(text)["input_ids"]
        assert len(ids) == len(text) and tokens.decode(ids) == text
    assert tokens.decode([*tokens("85")["input_ids"], 1], skip_special_tokens=True) == "85"
    assert (tokens.pad_token_id, tokens.eos_token_id, tokens.bos_token_id) == (0, 1, None)


def test_no_range_of_a_held_out_game_is_played_in_training():
    train, test = tool_tasks.game_ranges("train"), tool_tasks.game_ranges("test")
    assert (len(train), len(test)) == (24, 6) and not {*train} & {*test}
    rows = {split: tool_tasks.game_examples(split) for split in ("train", "test")}
    asked = {split: {row["prompt"][0]["content"] for row in rows[split]} for split in rows}
    assert not asked["train"] & asked["test"]
    # Each number of a range is a secret as often as the others: none is ruled out by the range.
    for split, ranges in (("train", train), ("test", test)):
        assert len(rows[split]) == sum(high - low + 1 for low, high in ranges)


@pytest.mark.parametrize("secret", range(3, 10))
def test_three_guesses_that_halve_what_is_left_find_one_of_seven_numbers(secret):
    game, low, high = tool_tasks.GuessingGame(), 3, 9
    game.reset(secret=secret, prompt=[])
    while not game.done:
        number = (low + high) // 2
        said = game.guess(number)
        low, high = (number + 1, high) if said == "higher" else (low, number - 1)
    assert game.get_reward() == 1.0 and game.guesses <= 3


def test_a_game_is_over_and_lost_after_three_wrong_guesses():
    game = tool_tasks.GuessingGame()
    game.reset(secret=5, prompt=[])
    said = [game.guess(number) for number in (3, 8, 6)]
    assert said == ["higher", "lower", "lower"] and game.done and game.get_reward() == 0.0


def test_the_model_of_the_game_was_shown_no_held_out_range_and_only_three_guesses():
    draw, held_out = random.Random(0), tool_tasks.game_ranges("test")
    asked = {f"<user>{low}-{high}?<eos><assistant>" for low, high in held_out}
    for _ in range(300):
        shown = tool_model._game_played(draw)
        assert shown[0][0] not in asked
        assert 1 <= sum(own for _, own in shown) <= tool_tasks.GUESSES


def test_any_text_is_bytes_and_comes_back():
    tokens = tiny.tiny_tokenizer()
    for text in ("What is 10 + 3?", " two  spaces\n\ttab ", "é€😀", "<|user|>x"):
        ids = tokens(text)["input_ids"]
        assert len(ids) == len(text.encode()) and tokens.decode(ids) == text
    assert tokens("<eos>")["input_ids"] == [tokens.eos_token_id]


def test_tiny_prompts_held_out_are_others():
    train, test = (
        {row["prompt"] for row in synthetic.synthetic_rows(config(path="make:tiny"), s)}
        for s in ("train", "test")
    )
    assert len(train) == 64 and len(test) == 16 and not train & test
    for plain, chat in zip(
        tiny.tiny_examples("test"), tiny.tiny_chat_examples("test"), strict=True
    ):
        assert chat["prompt"] == [{"role": "user", "content": plain["prompt"]}]


@pytest.mark.parametrize("name", sorted(synthetic.SYNTHETIC_DATA))
def test_data_has_no_other_split(name):
    with pytest.raises(KeyError):
        synthetic.synthetic_rows(config(path=f"make:{name}"), "tset")


def loaded(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    return kind.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow_but("addition", "tiny_reward", "vision")
@pytest.mark.parametrize("name", MODELS)
def test_a_made_model_and_its_tokenizer_go_together(name, cache):
    model, tokens = loaded(synthetic.resolve_model_path(f"make:{name}"))
    assert model.get_input_embeddings().weight.shape[0] == len(tokens)
    config = model.config.get_text_config()
    assert config.eos_token_id == tokens.eos_token_id == 1
    assert config.pad_token_id == tokens.pad_token_id == 0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.slow_but("addition", "tiny_reward", "vision")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_made_once(name, cache, monkeypatch):
    first = synthetic.resolve_model_path(f"make:{name}")
    assert first.startswith(str(cache)) and os.path.basename(first) in os.listdir(cache)
    monkeypatch.setattr(data_cache, "_make", None)
    assert synthetic.resolve_model_path(f"make:{name}") == first


@pytest.mark.slow_but("addition", "tiny_reward", "vision")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_made_alike_each_time(name, cache, monkeypatch):
    first = loaded(synthetic.resolve_model_path(f"make:{name}"))[0].state_dict()
    monkeypatch.setenv("RLOO_CACHE", f"{cache}-again")
    torch.rand(3)
    again = loaded(synthetic.resolve_model_path(f"make:{name}"))[0].state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)


@pytest.mark.slow_but("addition", "tiny_reward", "vision")
@pytest.mark.parametrize("name", MODELS)
def test_making_leaves_every_random_state_alone(name, cache):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    synthetic.resolve_model_path(f"make:{name}")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


def test_a_path_that_names_nothing_made_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert synthetic.resolve_model_path("org/model") == "org/model"
    assert synthetic.resolve_model_path("/a/b") == "/a/b"
    assert synthetic.resolve_model_path("~/b") == "/home/me/b"


def put(text):
    return lambda folder: (folder / "file").write_text(text)


def test_a_folder_that_is_kept_has_its_own_name_for_each_recipe(cache):
    one, other = (
        data_cache.cached_folder("x", "a", put("1")),
        data_cache.cached_folder("x", "b", put("2")),
    )
    assert one != other
    assert (one / "file").read_text() == "1" and (other / "file").read_text() == "2"
    assert data_cache.cached_folder("x", "a", put("3")) == one and (one / "file").read_text() == "1"


def test_a_half_made_folder_is_not_used(cache):
    def killed(folder):
        put("half")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data_cache.cached_folder("x", "a", killed)
    assert not [name for name in os.listdir(cache) if not name.startswith(".")]
    assert (data_cache.cached_folder("x", "a", put("whole")) / "file").read_text() == "whole"
    assert len(os.listdir(cache)) == 1  # what this process left half is gone


def test_who_is_quicker_is_believed(cache):
    def slow(folder):
        put("slow")(folder)
        if "quick" not in done:
            done.append("quick")
            other = folder.with_name(folder.name.removeprefix(".").removesuffix(f".{os.getpid()}"))
            other.mkdir()
            put("quick")(other)

    done = []
    assert (data_cache.cached_folder("x", "a", slow) / "file").read_text() == "quick"
    assert len(os.listdir(cache)) == 1


def test_a_folder_that_cannot_get_its_name_is_an_error(cache, monkeypatch):
    def refuse(*_):
        raise OSError("read-only")

    monkeypatch.setattr("pathlib.Path.rename", refuse)
    with pytest.raises(MachineError, match="read-only"):
        data_cache.cached_folder("x", "a", put("1"))
    assert os.listdir(cache) == []


def test_a_model_that_is_being_made_tells_how_far_it_has_come(cache, monkeypatch):
    monkeypatch.setattr(addition, "LONGEST", 20)
    heard = []
    with data_cache.listen_to_progress(heard.append):
        addition.addition_model_folder()
    assert [text.partition(", ")[2] for text in heard] == ["step 10", "step 20"]
    shares = [int(text.removeprefix("about ").partition("%")[0]) for text in heard]
    assert 0 <= shares[0] <= shares[1] <= 100
    data_cache.report_progress("nobody listens now")
    assert len(heard) == 2
