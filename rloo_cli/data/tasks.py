"""Procedural tasks of reasoning-gym: `data.path=reasoning_gym:NAME`. (arXiv 2505.24760)

An example is a question (`prompt`), its `answer`, the task's name, and `entry`, from which the
reward `reasoning_gym` gets the question and the task's own scorer: reasoning-gym's dict written as
a Python literal, or, if it holds objects, the arguments to create it again. (Not always the
latter: four tasks differ in every process, because they depend on the order of a set.)

Question i is drawn with the seed `data.task.seed` + i. Held-out questions have seeds that no
training question has, and training questions that happen to equal one are left out.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Protocol

from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.pasted import guess_name
from rloo_cli.config.schema import DataConfig, TaskConfig
from rloo_cli.config.synthetic import TASK_PREFIX
from rloo_cli.data.cache import cached_folder
from rloo_cli.utils.errors import DataError, refuse, require_package
from rloo_cli.utils.files import JsonObject

TASK_SPLITS = ("train", "test")
HELD_OUT_SEED = 2**31  # added to the seed of held-out questions; seed + size stay below it
KEYS_OF_OUR_OWN = ("seed", "size")


class TaskDataset(Protocol):
    """A data set of reasoning-gym: entries by index, and the task's scorer."""

    def __getitem__(self, index: int) -> JsonObject: ...

    def score_answer(self, answer: str | None, entry: JsonObject) -> float: ...


def require_reasoning_gym(key: str = "data.path") -> None:
    """Raises MachineError when reasoning-gym is not installed."""
    why = "that package has the tasks and the scorers"
    require_package(key, "reasoning-gym", "tasks", why)


def task_rows(source: DataConfig, split: str) -> list[JsonObject]:
    """The rows of a split of `reasoning_gym:NAME`; made once, and kept in the cache.

    Raises KeyError for an unknown split, MachineError without reasoning-gym, DataError
    for an unknown task or difficulty.
    """
    if split not in TASK_SPLITS:
        raise KeyError(split)
    require_reasoning_gym()
    config = source.task
    assert config is not None and source.path is not None  # data_rules
    name = source.path.removeprefix(TASK_PREFIX)
    stages = difficulty_stages(config)
    for stage in stages:
        _check_task(name, stage)
    version = importlib.metadata.version("reasoning-gym")
    recipe = json.dumps([name, split, version, config.model_dump()], sort_keys=True)
    folder = cached_folder(
        f"task-{name}", recipe, lambda folder: _write_examples(name, split, config, folder)
    )
    lines = (folder / "examples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def difficulty_stages(config: TaskConfig) -> list[JsonObject]:
    """The difficulties of the training questions, in the order in which they are asked."""
    return [config.difficulty | stage for stage in config.curriculum or [{}]]


def entry_score(entry: str, answer: str | None) -> float:
    """The task's own score of an answer (None: no answer was found), usually 0 to 1.

    entry: the column of that name. Raises MachineError without reasoning-gym.
    """
    require_reasoning_gym()
    dataset, question = _entry_question(entry)
    return float(dataset.score_answer(answer, question))


def _write_examples(name: str, split: str, config: TaskConfig, folder: Path) -> None:
    held_out = [*_held_out_examples(name, config)]
    if split == "train":
        known = {example["prompt"] for example in held_out}
        examples = [e for e in _training_examples(name, config) if e["prompt"] not in known]
    else:
        examples = held_out
    lines = [json.dumps(example) + "\n" for example in examples]
    (folder / "examples.jsonl").write_text("".join(lines))


def _held_out_examples(name: str, config: TaskConfig) -> Iterator[JsonObject]:
    """Questions of the last stage, each once."""
    seed, seen = config.seed + HELD_OUT_SEED, set()
    for index in range(config.eval_size):
        example = _example(name, seed, config.eval_size, index, difficulty_stages(config)[-1])
        if example["prompt"] not in seen:
            seen.add(example["prompt"])
            yield example


def _training_examples(name: str, config: TaskConfig) -> Iterator[JsonObject]:
    stages = difficulty_stages(config)
    for index in range(config.size):
        stage = stages[index * len(stages) // config.size]
        yield _example(name, config.seed, config.size, index, stage)


def _example(name: str, seed: int, size: int, index: int, difficulty: JsonObject) -> JsonObject:
    values = {"task": name, "seed": seed, "size": size, "index": index, "difficulty": difficulty}
    dataset = _task_dataset(name, seed, size, json.dumps(difficulty, sort_keys=True))
    question = dataset[index]
    literal = repr(question) if _is_literal(question) else None
    answer = question["answer"]
    return {
        "prompt": question["question"],
        "answer": None if answer is None else str(answer),
        "task": name,
        "entry": json.dumps(values | {"literal": literal}, sort_keys=True),
    }


def _is_literal(question: JsonObject) -> bool:
    try:
        return bool(ast.literal_eval(repr(question)) == question)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


@functools.lru_cache(maxsize=4096)
def _entry_question(entry: str) -> tuple[TaskDataset, JsonObject]:
    """The data set and the question of an entry."""
    values = json.loads(entry)
    difficulty = json.dumps(values["difficulty"], sort_keys=True)
    dataset = _task_dataset(values["task"], values["seed"], values["size"], difficulty)
    literal = values["literal"]
    return dataset, dataset[values["index"]] if literal is None else ast.literal_eval(literal)


@functools.lru_cache(maxsize=64)
def _task_dataset(name: str, seed: int, size: int, difficulty: str) -> TaskDataset:
    import reasoning_gym

    values = {"seed": seed, "size": size} | json.loads(difficulty)
    dataset: TaskDataset = reasoning_gym.create_dataset(name, **values)
    return dataset


def _check_task(name: str, difficulty: JsonObject) -> None:
    """Raise DataError for a task or a difficulty that reasoning-gym does not know."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = nearest_names(name, DATASETS)
        why = f"it has {len(DATASETS)} tasks; the nearest: {', '.join(close) or 'none'}"
        what = f"reasoning-gym has no task {name!r}"
        fix = f"data.path={TASK_PREFIX}{guess_name(name, DATASETS)}"
        refuse("data.path", what, fix, why, error=DataError)
    names = [f.name for f in fields(DATASETS[name][1]) if f.name not in KEYS_OF_OUR_OWN]
    unknown = [key for key in difficulty if key not in names]
    if unknown:
        close = nearest_names(unknown[0], names)
        what = f"the task {name} has no difficulty {unknown[0]!r}"
        fix = f"{(close or ['one of these'])[0]} instead of {unknown[0]}"
        why = f"it has: {', '.join(names)}"
        refuse("data.task.difficulty", what, fix, why, error=DataError)
    try:
        _task_dataset(name, 0, 1, json.dumps(difficulty, sort_keys=True))[0]
    except Exception as error:  # its validate() asserts; some bad values fail only later
        what = f"the task {name} refuses this difficulty"
        why = f"{json.dumps(difficulty)}: {type(error).__name__}: {error}"
        fix = "correct the named value, or leave out data.task.difficulty"
        refuse("data.task.difficulty", what, fix, why, error=DataError)
