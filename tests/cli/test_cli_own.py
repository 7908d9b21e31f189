"""Recipes, groups and rewards of the user's own, run names that are taken, and secrets."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo

from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config import check, compose
from rloo_cli.launch import launcher
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import read_json, update_json

TINY = """defaults:
  - override /model: tiny
  - override /data: tiny
  - override /reward: unique_chars
max_steps: 2
"""


def refusal(*words: str, dirs: tuple[str, ...] = ()) -> ConfigError:
    """What composing and checking these words is refused with."""
    with pytest.raises(ConfigError) as refused:
        check.check_config(compose.compose_config(words, dirs))
    return refused.value


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and we are in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["my.yaml", "deep/er/my.yml", "with-dash and space.yaml"])
def test_a_recipe_may_be_a_file(name: str, here: Path) -> None:
    (here / name).parent.mkdir(parents=True, exist_ok=True)
    (here / name).write_text(TINY + "algorithm: {beta: 0.25}\n")
    for path in (name, str(here / name)):
        run = check.check_config(compose.compose_config([f"+recipe={path}", "seed=3"]))
        assert (run.algorithm.beta, run.seed, run.max_steps) == (0.25, 3, 2)
        assert run.name.startswith(Path(name).stem.replace(" ", "-") + "-tiny-")


def test_a_copied_recipe_is_the_same_experiment(here: Path, rloo: Rloo) -> None:
    assert rloo("recipes", "copy", "smoke", "mine.yaml").code == 0
    copy, original = (
        check.check_config(compose.compose_config([f"+recipe={name}"]))
        for name in ("mine.yaml", "smoke")
    )
    assert check.dump_config(copy) == check.dump_config(original)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("text", "line", "key"),
    [  # more of each kind in tests/config/test_refusals_config.py and test_hostile.py
        ("a: [1\nb: 2\n", ":2", "my.yaml"),
        ("- 1\n", "", "my.yaml"),
        ("a: " + "[" * 5000, "", "valid YAML"),
        ("defaults:\n  - override /model: tny\n", ":2", "'tny'"),
        ("defaults:\n  - override /modle: tiny\n", ":2", "'modle'"),
        (TINY + "seed: ${nothing.here}\n", ":6", "'nothing.here'"),
        (TINY + "modle: {path: x}\n", ":6", "modle"),
        (TINY + "model:\n  dtype: fp16\n", ":7", "model.dtype"),
        (TINY + "reward:\n  mine: {weight: 2}\n", ":7", "reward.mine"),
    ],
)
def test_a_recipe_file_that_is_wrong_is_named_with_its_line(
    text: str, line: str, key: str, here: Path
) -> None:
    (here / "my.yaml").write_text(text)
    problem = assert_refused(refusal("+recipe=my.yaml"), key=key)
    assert problem.where == f"my.yaml{line}"
    assert [p.name for p in here.iterdir()] == ["my.yaml"]


def test_a_recipe_file_that_is_not_there_is_looked_for_by_its_full_path(here: Path) -> None:
    problem = assert_refused(refusal("+recipe=sub/my.yaml"), key="sub/my.yaml")
    assert f"{here}/sub/my.yaml" in problem.why


@pytest.mark.parametrize(
    "level", ["&{n} [{p}]", "&{n} {{a: {p}, b: {p}}}"], ids=["lists", "mappings"]
)
def test_an_alias_bomb_is_refused_at_once(level: str, here: Path) -> None:
    many = ",".join(["*{0}"] * 10) if "[" in level else "*{0}"
    lines = ["l0: &l0 {x: 1}"]
    for i in range(1, 30):
        lines.append(f"l{i}: " + level.format(n=f"l{i}", p=many.format(f"l{i - 1}")))
    (here / "bomb.yaml").write_text(TINY + "\n".join(lines))
    assert_refused(refusal("+recipe=bomb.yaml"), key="too large", where="bomb.yaml")


def test_anchors_are_welcome_where_they_are_few(here: Path) -> None:
    (here / "my.yaml").write_text(
        TINY + "train: {prompts_per_step: &p 8}\neval: {batch_size: *p}\n"
    )
    run = check.check_config(compose.compose_config(["+recipe=my.yaml"]))
    assert run.eval.batch_size == 8


# Groups of the user's own.


@pytest.fixture
def own(here: Path) -> Path:
    """A --config-dir with a model, a recipe in `recipes/` and one in `recipe/`."""
    for name, text in {
        "model/mine.yaml": "defaults: [default, _self_]\npath: make:tiny\ndtype: float32\n",
        "recipes/one.yaml": "# One.\n" + TINY.replace("model: tiny", "model: mine"),
        "recipe/two.yaml": "# Two.\n" + TINY.replace("model: tiny", "model: mine"),
    }.items():
        (here / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "own" / name).write_text(text)
    return here / "own"


@pytest.mark.parametrize("recipe", ["one", "two", "own/recipes/one.yaml"])
def test_config_dir_adds_groups_and_recipes(recipe: str, own: Path) -> None:
    run = check.check_config(compose.compose_config([f"+recipe={recipe}"], [own]))
    assert run.model.dtype == "float32"


def test_config_dir_works_on_the_command_line(own: Path, rloo: Rloo) -> None:
    for flag in (["--config-dir", "own"], ["--config-dir=own"], ["-cd", str(own)]):
        ended = rloo("train", "+recipe=two", *flag, "--dry-run")
        assert ended.code == 0, ended.said
        assert "dtype: float32" in ended.out


def test_what_is_wrong_in_a_config_dir_is_named_with_its_line(own: Path) -> None:
    (own / "model" / "mine.yaml").write_text("path: make:tiny\ndtyp: float32\n")
    assert_refused(refusal("+recipe=one", dirs=("own",)), key="model.dtyp", where="mine.yaml:2")
    (own / "model" / "mine.yaml").write_text("path: [\n")
    assert_refused(refusal("+recipe=one", dirs=("own",)), where="own/model/mine.yaml:2")
    assert_refused(refusal("+recipe=smoke", "model=mine"), key="'mine'")


# Rewards of the user's own: what can be seen without running them.


@pytest.mark.parametrize(
    ("source", "spec", "said"),
    [
        (None, "mine.py:score", {"key": "mine.py"}),
        ("def score(:\n", "mine.py:score", {"where": "mine.py:1"}),
        ("def scores(x): ...\n", "mine.py:score", {"key": "'score'", "fix": "mine.py:scores"}),
        ("def score(x): ...\n", "mine.py", {"key": "'mine.py'", "fix": "file.py:name"}),
        ("def score(x): ...\n", "mine.py:", {"fix": "file.py:name"}),
        ("def score(x): ...\n", "", {"key": "reward.function.path", "fix": "=VALUE"}),
    ],
)
def test_a_reward_that_is_not_there_costs_no_start(
    source: str | None, spec: str, said: dict[str, str], here: Path
) -> None:
    if source is not None:
        (here / "mine.py").write_text(
            "import nothing_of_that_name\n" * ("def s" not in source) + source
        )
    path = [f"reward.function.path={spec}"] if spec else []
    error = refusal("+recipe=smoke", "reward=function", *path)
    assert_refused(error, **said)
    assert len(error.problems) == 1


def test_what_an_entry_of_a_reward_leaves_out_is_as_in_the_file_of_its_type(here: Path) -> None:
    (here / "rw.py").write_text("def first(x): ...\ndef second(x): ...\n")
    words = ["+recipe=smoke", "reward=function", "reward.function.path=rw.py:first"]
    two = "+reward.two={type: function, path: rw.py:second, weight: 0.5}"
    run = check.check_config(compose.compose_config([*words, two]))
    first, second = run.rewards["function"], run.rewards["two"]
    assert (second.path, second.weight, second.kwargs) == ("rw.py:second", 0.5, {})
    assert second == first.model_copy(update={"path": "rw.py:second", "weight": 0.5})
    judge = "+reward.two={type: judge, model: x}"  # scope is row in conf/reward/judge.yaml
    assert check.check_config(compose.compose_config([*words, judge])).rewards["two"].scope == "row"
    (here / "my.yaml").write_text(
        "defaults: [smoke]\neval:\n  judge: {type: reward, against: reference, max_pairs: null,\n"
        "    reference_column: answer, reward: {type: function, path: 'rw.py:first'}}\n"
    )
    judge_of_eval = check.check_config(compose.compose_config(["+recipe=my.yaml"])).eval.judge
    assert judge_of_eval.reward.kwargs == {}
    for wrong, key in (("", "path"), (", path: rw.py:second, kwarg: {a: 1}", "kwarg")):
        error = refusal(*words, f"+reward.two={{type: function{wrong}}}")
        assert_refused(error, key=f"reward.two.{key}")
        assert len(error.problems) == 1


# A run's name that is taken. A run is made up here: its files, without the training.


def make_run(state: str, *words: str, **facts: object) -> Path:
    composed = compose.compose_config(["+recipe=smoke", *words])
    run = check.check_config(composed)
    folder = Path(run.root, run.name)
    launcher.write_attempt_files(ResumePlan(folder), run, composed)
    update_json(folder / "run.json", state=state, **facts)
    return folder


def test_a_finished_run_is_not_done_again(
    here: Path, rloo: Rloo, sentence: Callable[..., None]
) -> None:
    make_run("finished")
    ended = rloo("train", "+recipe=smoke")
    assert ended.code == 0
    again = rloo("train", "+recipe=smoke", "logging.samples=0")  # how it is told is not what it is
    assert again.code == 0 and again.out == ended.out
    sentence(ended.out)


def test_a_name_of_another_config_is_refused_with_the_difference_and_the_choices(
    here: Path, rloo: Rloo, sentence: Callable[..., None]
) -> None:
    make_run("finished", fingerprint="x")
    before = rloo.left()
    for word, change, where in (
        ("algorithm.beta=0.1", "algorithm.beta: 0.05 -> 0.1", "name"),
        ("max_steps=3", "step ?", "resume"),
        ("reward=length_chars", "more", "name"),  # 10 changes are shown
    ):
        ended = rloo("train", "+recipe=smoke", word)
        assert_refused(ended, key=change, where=where, fix="mv runs/smoke")
        if word == "algorithm.beta=0.1":
            sentence(ended)
    assert rloo.left() == before


def test_a_folder_that_is_no_run_is_left_alone(
    here: Path, rloo: Rloo, sentence: Callable[..., None]
) -> None:
    (here / "runs" / "smoke").mkdir(parents=True)
    (here / "runs" / "smoke" / "thesis.tex").write_text("")
    ended = rloo("train", "+recipe=smoke")
    assert_refused(ended, key="runs/smoke")
    sentence(ended)


def test_a_run_that_ended_before_it_began_is_begun_anew_unasked(here: Path, rloo: Rloo) -> None:
    make_run("failed", pid=2**22 + 1)  # above the largest a process can have
    ended = rloo("train", "+recipe=smoke", "max_steps=1", "logging.samples=0")
    assert ended.code == 0, ended.said
    assert read_json(Path("runs/smoke/run.json"))["attempt"] == 2


def test_two_that_start_at_the_same_moment_do_not_both_get_the_folder(tmp_path: Path) -> None:
    with (
        launcher.lock_folder(tmp_path),
        pytest.raises(ConfigError) as refused,
        launcher.lock_folder(tmp_path),
    ):
        pass
    assert_refused(refused, key="trained")
    with launcher.lock_folder(tmp_path):  # free again
        pass


def test_a_run_that_is_alive_is_left_alone(here: Path) -> None:
    folder = make_run("training")  # by this process
    with pytest.raises(ConfigError) as refused:
        launcher._check_not_running(folder)
    assert_refused(refused, key=str(os.getpid()))
    update_json(folder / "run.json", pid_started="0")  # another process has the number now
    assert not child_process.is_process_alive(read_json(folder / "run.json"))


# Secrets.

SECRET = "hf_" + "sEcReT0" * 5


@pytest.mark.parametrize(
    "word",
    [
        f"+hf_token={SECRET}",
        f"name={SECRET}",
        f"+model.token={SECRET}",
        f"data.columns={{a:{SECRET}}}",
        "logging.wandb_api_key=xyz",
        "+model.password=xyz",
        f"+recipe={SECRET}",
        f"--hf-token={SECRET}",
        f"~{SECRET}",
        SECRET,
        "name=sk-" + "a1" * 12,
    ],
)
def test_a_secret_is_refused_and_found_nowhere(word: str, rloo: Rloo) -> None:
    for flags in ([], ["--multirun", "seed=1,2"]):
        ended = rloo("train", "+recipe=smoke", word, *flags)
        assert_refused(ended, key="a secret", fix="export ")
        secret = word.rpartition("=")[2].strip("}").rpartition(":")[2]
        assert secret not in ended.said
        assert rloo.left() == []


def test_one_checkpoint_is_not_enough(rloo_without_torch: Rloo) -> None:
    ended = rloo_without_torch("train", "+recipe=smoke", "checkpoint.keep_last=1")
    assert_refused(ended, key="checkpoint.keep_last", fix="2")
