"""Several sources by weight: config, order, columns, ledger, resume."""

import json
from collections import Counter
from pathlib import Path

import pytest
from assert_refused import assert_refused
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as some
from ledger_audit import audit_ledger
from ledger_cases import lines
from loop_cases import checked, make
from prompt_cases import tokenizer
from resume_cases import attempt, differing, left

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.data import order, splits
from rloo_cli.data.order import Source, mixture_quotas, prompt_index_at
from rloo_cli.rewards.engine.columns import check_reward_splits
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import ConfigError, DataError

NO_SET = "data.eval_split=null"


def mix(*sources: tuple[int, float]) -> tuple[Source, ...]:
    return tuple(Source(f"s{i}", n, w, f"data{i}") for i, (n, w) in enumerate(sources))


def drawn(parts, first: int, count: int, seed: int = 1, shuffle: bool = True) -> list[int]:
    n = sum(s.prompts for s in parts)
    return [
        prompt_index_at(index, n, seed, "all", shuffle, parts)
        for index in range(first, first + count)
    ]


# The order


@how(deadline=None, max_examples=60)
@given(
    sources=some.lists(some.tuples(some.integers(1, 40), some.floats(0.01, 50)), min_size=1,
                       max_size=5),
    epoch=some.integers(0, 20),
)  # fmt: skip
def test_draws_follow_the_weights_and_every_source_cycles_by_itself(sources, epoch) -> None:
    parts = mix(*sources)
    n, weights = sum(s.prompts for s in parts), sum(s.weight for s in parts)
    got = drawn(parts, 0, n * (epoch + 1)) if n * epoch < 400 else drawn(parts, 0, n)
    for done in (n, len(got)):
        first = 0
        for source in parts:
            mine = [i - first for i in got[:done] if first <= i < first + source.prompts]
            assert abs(len(mine) - done * source.weight / weights) <= len(parts)
            times = Counter(mine)
            assert max(times.values(), default=0) - min(times.values(), default=0) <= 1
            assert not mine or len(mine) < source.prompts or len(times) == source.prompts
            first += source.prompts
    before, after = mixture_quotas(parts, epoch)
    assert sum(before) == n * epoch and sum(after) == n * (epoch + 1)
    assert all(b <= a for b, a in zip(before, after, strict=True))


def test_shares_are_exact_in_the_long_run_and_even_inside_an_epoch() -> None:
    parts = mix((10, 2.0), (5, 1.0), (7, 3.0))
    assert mixture_quotas(parts, 5)[1] == [44, 22, 66]  # six epochs of 22 draws
    of = [0 if i < 10 else 1 if i < 15 else 2 for i in drawn(parts, 0, 66)]
    for end in range(6, 67):
        counts = Counter(of[:end])
        assert all(abs(counts[s] - end * w / 6) <= 3 for s, w in enumerate((2, 1, 3)))


def test_a_place_has_the_same_prompt_whatever_was_asked_before() -> None:
    parts = mix((6, 2.0), (3, 1.0))
    whole = drawn(parts, 0, 60)
    order.mixture_permutation.cache_clear()
    order.mixture_quotas.cache_clear()
    assert drawn(parts, 41, 7) == whole[41:48]
    assert [drawn(parts, at, 1)[0] for at in (59, 3, 30)] == [whole[59], whole[3], whole[30]]
    assert whole != drawn(parts, 0, 60, seed=2)
    assert whole[:9] != whole[9:18]


def test_without_shuffling_each_source_is_in_the_order_of_its_file() -> None:
    got = drawn(mix((4, 1.0), (4, 1.0)), 0, 16, shuffle=False)
    assert [i for i in got if i < 4] == [0, 1, 2, 3] * 2
    assert got[:4] == [0, 4, 1, 5]


def test_the_order_in_this_version_is_the_order_in_every_version() -> None:
    """A resumed run must draw what the first would have: change this only with the format."""
    assert drawn(mix((3, 2.0), (2, 1.0)), 0, 15) == PINNED


PINNED = [3, 0, 2, 4, 1, 2, 3, 0, 1, 2, 1, 4, 0, 0, 3]

# In the config


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """Two files: three rows of sums with an answer, weight 2, and five riddles with a hint."""
    sums = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    riddles = [{"question": f"What is {i}?", "hint": f"h{i}", "level": i} for i in range(5)]
    a, b = write(tmp_path, "sums", sums), write(tmp_path, "riddles", riddles)
    return (
        "data.path=null", NO_SET,
        f"data.mixture={{sums: {{path: '{a}', weight: 2}},"
        f" riddles: {{path: '{b}', weight: 1, prompt_column: question}}}}",
    )  # fmt: skip


def test_what_a_source_leaves_out_is_as_in_data(words) -> None:
    data = checked((), (*words, "data.max_samples=4", "data.name=x", "data.shuffle=false")).data
    assert data.path is None and data.mixture_weights == {"sums": 2.0, "riddles": 1.0}
    riddles = data.mixture_sources["riddles"]
    assert (riddles.split, riddles.max_samples, riddles.shuffle) == ("train", 4, False)
    assert riddles.name is None  # it only says where data.path is
    assert (riddles.prompt_column, data.mixture_sources["sums"].prompt_column) == (
        "question",
        "prompt",
    )


def refused(*given: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        checked((), given)
    return caught.value


def test_rows_come_from_a_path_or_from_a_mixture(words, sentence) -> None:
    both = refused(*words, "data.path=make:tiny")
    assert_refused(both, key="data.mixture", fix="data.path=null")
    sentence(both)
    for none in ((), ("data.mixture={}",)):
        assert_refused(refused("data.path=null", NO_SET, *none), fix="data.path=PATH")
    held_out = refused(*words, "data.eval_split=test")
    assert_refused(held_out, key="data.eval_split", fix="data.eval_split=null")
    sentence(held_out)
    checked((), (*words, "eval.sets.a={path: 'make:tiny', split: test}"))


def test_a_source_has_a_weight_and_a_path_and_a_good_name(words, sentence) -> None:
    one = ("data.path=null", NO_SET)
    for key, asked in {
        "data.mixture.a.weight": (*one, "data.mixture.a.path=make:tiny"),
        "data.mixture.a.path": (*one, "data.mixture.a.weight=1"),
        "data.mixture.sums.weight": (*words, "data.mixture.sums.weight=0"),
        "data.mixture.sums.wieght": (*words, "data.mixture.sums.wieght=1"),
    }.items():
        assert_refused(refused(*asked), key=key, where="command line: data.mixture")
    assert_refused(refused(*words, "data.mixture.sums.path=./no.jsonl"), key="no.jsonl")
    odd_name = refused(*one, "data.mixture={a-b: {path: x}}")
    assert_refused(odd_name, key="data.mixture.a-b")
    sentence(odd_name)


MINE = """# A mixture of my own.
defaults: [{override /model: tiny}, {override /reward: unique_chars}]
data:
  mixture: {sums: {path: make:addition, weight: 2}, others: {path: make:tiny, weight: 1}}
  filter: {answer: "4"}
  max_samples: 9
  streaming: true
eval: {sets: {sums: {path: make:addition, split: test}}}
max_steps: 5
"""


def test_a_recipe_needs_no_null_path_and_debug_trains_on_what_is_made_here(tmp_path) -> None:
    (tmp_path / "my.yaml").write_text(MINE.replace("  streaming: true\n", ""))
    mine = check.check_config(compose_config([f"+recipe={tmp_path}/my.yaml"])).data
    assert mine.path is None and [*mine.mixture_weights] == ["sums", "others"]
    (tmp_path / "my.yaml").write_text(MINE)
    run = check.check_config(compose_config([f"+recipe={tmp_path}/my.yaml", "+debug=cpu"]))
    data = run.data
    assert data.path == "make:tiny" and data.mixture is None and data.filter is None
    assert not data.streaming and run.held_out["sums"].path == "make:tiny"


def test_rewards_see_the_columns_of_all_sources_and_which_one_it_is(words, tmp_path) -> None:
    seen = []

    def look(completions, answer, hint, source, **_):
        seen.extend(zip(answer, hint, source, strict=True))
        return [float(len(c)) for c in completions]

    run = make(tmp_path, *words, "max_steps=2", "train.prompts_per_step=6", rewards={"f": look})
    assert len(run.prompts) == 8
    run_training_loop(run)
    assert {s for _, _, s in seen} == {"sums", "riddles"}
    assert all((a is None) == (s == "riddles") == (h is not None) for a, h, s in seen)
    k = run.config.algorithm.num_generations
    assert Counter(s for *_, s in seen[::k]) == {"sums": 8, "riddles": 4}
    (header, *steps) = lines(run.folder)
    assert [s["name"] for s in header["mixture"]] == ["sums", "riddles"]
    assert sum(row < 3 for step in steps for row in step["rows"]) == 8
    assert audit_ledger(run.folder).fates.total() == 12


def test_a_ledger_of_another_mixture_is_noticed(words, tmp_path) -> None:
    run = make(tmp_path, *words, "max_steps=2", rewards=None)
    run_training_loop(run)
    path = run.folder / "ledger.jsonl"
    text = path.read_text()
    for old, new, key in (('t": 2.0', 't": 9.0', "check"), ('s": 3', 's": 4', "8")):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(AssertionError, match=rf"ledger\.jsonl:1: .*{key}"):
            audit_ledger(run.folder)


def prepared(given: tuple[str, ...]):
    settings = checked((), given)
    opened = splits.open_splits(settings)
    check_reward_splits(settings, opened, [])
    return splits.tokenize_splits(settings, opened, tokenizer(), 256)


def test_weights_and_content_are_in_the_fingerprint_and_rows_are_counted_through(words) -> None:
    found = prepared((*words, "data.max_prompt_length=10"))[None]
    assert list(found.example_numbers) == [0, 1, 2, 3, 4, 5, 6, 7]
    other = prepared((*words, "data.max_prompt_length=10", "data.mixture.sums.weight=3"))[None]
    assert other.fingerprint != found.fingerprint
    cut = prepared((*words, "data.mixture.sums.max_samples=2"))[None]
    assert len(cut) == 7 and cut.fingerprint != found.fingerprint
    notes = splits.split_notes(None, found)
    assert "sums 3" in notes[1] and "66.7%" in notes[1] and "1.78" in notes[1]


def test_conversations_and_plain_text_are_not_mixed(words, tmp_path, sentence) -> None:
    talk = write(tmp_path, "talk", [{"prompt": [{"role": "user", "content": "x"}]}] * 3)
    more = (*words, f"data.mixture.talk={{path: '{talk}', weight: 1}}")
    with pytest.raises(DataError) as caught:
        prepared(more)
    assert_refused(caught, 4, "data.mixture.talk", where="data.mixture")
    sentence(caught)


def test_a_source_with_a_column_named_source_is_refused(words, tmp_path, sentence) -> None:
    path = write(tmp_path, "taken", [{"prompt": "x", "source": "y"}] * 3)
    more = (*words, f"data.mixture.taken={{path: '{path}', weight: 1}}")
    with pytest.raises(DataError) as caught:
        prepared(more)
    renamed = "data.mixture.taken.columns={source: its_source}"
    assert_refused(caught, 4, "'source'", fix=renamed)
    sentence(caught)
    prepared((*more, renamed))


def test_what_is_wrong_with_a_source_is_said_of_its_keys(words) -> None:
    with pytest.raises(DataError) as caught:
        prepared((*words, "data.mixture.sums.prompt_column=nope"))
    assert_refused(caught, 4, "'nope'", where="data.mixture.sums.prompt_column")


def test_a_column_that_no_source_has_is_missed(words, tmp_path) -> None:
    with pytest.raises(DataError) as caught:
        make(tmp_path, *words, rewards={"f": lambda completions, gold: []})
    assert_refused(caught, 4, "'gold'", where="reward.f")


@pytest.mark.slow
def test_a_run_of_a_mixture_that_was_stopped_goes_on_as_if_it_had_not_been(words, tmp_path) -> None:
    words, looks = (*words, "checkpoint.every=1"), []
    assert attempt(tmp_path / "whole", *words, looks=looks)
    assert not attempt(tmp_path / "cut", *words, stop_at=len(looks) * 2 // 3)
    assert attempt(tmp_path / "cut", *words)
    whole, cut = left(tmp_path / "whole" / "smoke"), left(tmp_path / "cut" / "smoke")
    assert differing(whole, cut) == []
    audit_ledger(tmp_path / "cut" / "smoke")


def test_a_run_does_not_go_on_with_other_weights(words, tmp_path) -> None:
    looks: list[int] = []
    assert not attempt(tmp_path, *words, "checkpoint.every=1", looks=looks, stop_at=60)
    with pytest.raises(ConfigError) as caught:
        attempt(tmp_path, *words, "checkpoint.every=1", "data.mixture.sums.weight=3")
    assert_refused(caught, 2, "3.0", where="data.mixture.sums.weight", fix="resume_allow_changes")
