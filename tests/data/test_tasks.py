"""reasoning-gym's tasks: the same questions each time, and none held out that is trained on."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from assert_refused import assert_refused
from prompt_cases import config

from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig, TaskConfig
from rloo_cli.data import tasks
from rloo_cli.data.dataset import load_split
from rloo_cli.rewards import reasoning_gym as reward
from rloo_cli.utils.errors import ConfigError, DataError, MachineError
from rloo_cli.utils.files import JsonObject

pytestmark = pytest.mark.process  # only `make test-engines` installs what they need
PATH = "reasoning_gym:chain_sum"
CHAT = ("+recipe=smoke", "data=reasoning_gym", f"data.path={PATH}", "reward=reasoning_gym")


@pytest.fixture
def gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, and an empty cache."""
    pytest.importorskip("reasoning_gym", reason="pip install 'rloo-cli[tasks]'")
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path / "cache"))
    yield
    tasks._entry_question.cache_clear()
    tasks._task_dataset.cache_clear()


def task(**changes: object) -> TaskConfig:
    values = {"size": 40, "eval_size": 10, "seed": 3, "difficulty": {}, "curriculum": None}
    return TaskConfig.model_validate(values | changes)


def checked(*keys: str) -> RunConfig:
    return check_config(compose_config([*CHAT, *keys]))


def rows(split: str, keys: TaskConfig, path: str = PATH) -> list[JsonObject]:
    return tasks.task_rows(config(path=path, task=keys), split)


def digits(examples: list[JsonObject]) -> list[int]:
    """Digits of the first number of each sum."""
    return [len(e["prompt"].split(": ")[-1].split()[0].lstrip("-")) for e in examples]


def test_a_key_of_a_task_is_checked_before_anything_is_made(sentence) -> None:
    assert checked().data.task is not None and checked().data.task.size == 5000
    for words, key in (
        (("data.task.size=0",), "data.task.size"),
        (("data.task=null",), "data=reasoning_gym"),
        (("data.task.curriculum=[{max_digits: 1}]",), "data.shuffle=false"),
        (("data.task.difficulty={seed: 3}",), "seed"),
        (("data.task.curriculum=[]", "data.shuffle=false"), "data.task.curriculum"),
        ((f"model.path={PATH}",), "model.path"),
    ):
        with pytest.raises(ConfigError) as caught:
            checked(*words)
        assert_refused(caught, 2, key)
        sentence(caught)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MachineError, match=r"rloo-cli\[tasks\]"):
        rows("train", task())
    with pytest.raises(MachineError, match=r"rloo-cli\[tasks\]"):
        reward.preflight(checked().rewards["reasoning_gym"])  # type: ignore[arg-type]


def test_questions_are_the_same_each_time_and_others_with_another_seed(gym: None) -> None:
    first, again, other = (rows("train", keys) for keys in (task(), task(), task(seed=4000)))
    assert first == again and first != other and len(first) <= 40
    assert {"prompt", "answer", "task", "entry"} == set(first[0])


def test_held_out_questions_are_never_trained_on(gym: None) -> None:
    easy = task(size=300, eval_size=40, difficulty={"max_terms": 2, "max_digits": 1})
    train, test = (rows(split, easy) for split in tasks.TASK_SPLITS)
    questions = {e["prompt"] for e in test}
    assert len(questions) == len(test) > 10
    assert train and not questions & {e["prompt"] for e in train}
    seeds = [{json.loads(e["entry"])["seed"] for e in part} for part in (train, test)]
    assert seeds == [{3}, {3 + tasks.HELD_OUT_SEED}]


def test_a_curriculum_asks_easy_questions_first_and_holds_out_the_hardest(gym: None) -> None:
    stages = [{"min_digits": n, "max_digits": n} for n in (1, 2, 4)]
    stated = task(size=60, difficulty={"max_terms": 2}, curriculum=stages)
    train = rows("train", stated)
    assert digits(train) == sorted(digits(train)) and set(digits(train)) == {1, 2, 4}
    assert set(digits(rows("test", stated))) == {4}


def test_a_task_or_difficulty_that_is_not_known_is_refused_with_the_nearest(gym: None) -> None:
    cases: list[tuple[str, JsonObject, str]] = [
        ("reasoning_gym:chain_summ", {}, "data.path=reasoning_gym:chain_sum"),
        (PATH, {"max_digit": 2}, "max_digits instead of max_digit"),
        (PATH, {"min_digits": 5, "max_digits": 2}, "refuses this difficulty"),
    ]
    for path, difficulty, says in cases:
        with pytest.raises(DataError) as refused:
            rows("train", task(difficulty=difficulty), path)
        assert says in str(refused.value)
    with pytest.raises(DataError, match="no split 'tset'"):
        load_split(checked("data.task.size=40").data, "tset")


def test_an_answer_gets_what_the_tasks_own_scorer_gives(gym: None) -> None:
    examples = rows("train", task())[:3]
    entry = checked("reward.reasoning_gym.extract=answer_tag").rewards["reasoning_gym"]
    texts = [f"It is <answer> {e['answer']} </answer>." for e in examples] + ["no answer", "-"]
    entries = [*(e["entry"] for e in examples), examples[0]["entry"], None]
    scores = reward.score([*texts], {"entry": entries}, entry)  # type: ignore[arg-type]
    assert scores[:3] == [1.0, 1.0, 1.0] and scores[3] == 0.0 and scores[4] is None


@pytest.mark.slow
def test_every_task_scores_the_same_question_in_another_process(gym: None) -> None:
    """What a set decides in one process is otherwise in the next."""
    from reasoning_gym.factory import DATASETS

    code = (
        "import json, sys; from rloo_cli.data import tasks; e = json.load(sys.stdin)\n"
        "print(json.dumps([str(tasks._entry_question(x)[1]['question']) for x in e]))"
    )
    entries, questions = [], []
    for name in sorted(set(DATASETS) - {"composite"}):  # it is a mixture, as data.mixture is
        example = tasks._example(name, 5, 3, 1, {})
        entries.append(example["entry"])
        questions.append(str(example["prompt"]))
    for hash_seed in ("1", "2"):
        ended = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(entries), text=True, check=True,
            capture_output=True, env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )  # fmt: skip
        again = json.loads(ended.stdout.splitlines()[-1])
        assert [
            json.loads(e)["task"]
            for e, q, a in zip(entries, questions, again, strict=True)
            if q != a
        ] == []
