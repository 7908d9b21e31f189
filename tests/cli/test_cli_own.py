"""Recipes, groups and rewards of the user's own, run names that are taken, and secrets."""

from pathlib import Path

import pytest
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


def refusal(*words: str, dirs: tuple[str, ...] = ()) -> str:
    """What composing and checking these words is refused with."""
    with pytest.raises(ConfigError) as error:
        check.check_config(compose.compose_config(words, dirs))
    return error.value.render()


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


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("a: [1\nb: 2\n", ":2", "is not valid YAML"),
        ("x: 1\nx: 2\n", ":2", "found duplicate key x"),
        ("x: !!python/object/apply:os.system ['touch pwned']\n", ":1", "is not valid YAML"),
        ("- 1\n", "", "is not a mapping of keys"),
        ("a: &a [*a]\n", "", "is too large for a config"),
        ("a: " + "[" * 5000, "", "is not valid YAML"),
        ("defaults:\n  - override /model: tny\n", ":2", "there is no model 'tny'"),
        ("defaults:\n  - override /modle: tiny\n", ":2", "there is no group 'modle'"),
        (TINY + "model: {_target_: os.system, command: touch pwned}\n", ":6", "names no Python"),
        (TINY + "seed: ${nothing.here}\n", ":6", "'nothing.here' not found"),
        (TINY + "modle: {path: x}\n", ":6", "modle is not a key"),
        (TINY + "model:\n  dtype: fp16\n", ":7", "model.dtype = 'fp16' is not valid"),
        (TINY + "reward:\n  mine: {weight: 2}\n", ":7", "reward.mine is not a reward"),
    ],
)
def test_a_recipe_file_that_is_wrong_is_named_with_its_line(
    text: str, line: str, said: str, here: Path
) -> None:
    (here / "my.yaml").write_text(text)
    refused = refusal("+recipe=my.yaml")
    assert said in refused and f"  where    my.yaml{line}\n" in refused + "\n"
    assert [p.name for p in here.iterdir()] == ["my.yaml"]


def test_a_recipe_file_that_is_not_there_is_looked_for_by_its_full_path(here: Path) -> None:
    refused = refusal("+recipe=sub/my.yaml")
    assert "sub/my.yaml does not exist" in refused and f"looked at {here}/sub/my.yaml" in refused


@pytest.mark.parametrize(
    "level", ["&{n} [{p}]", "&{n} {{a: {p}, b: {p}}}"], ids=["lists", "mappings"]
)
def test_an_alias_bomb_is_refused_at_once(level: str, here: Path) -> None:
    many = ",".join(["*{0}"] * 10) if "[" in level else "*{0}"
    lines = ["l0: &l0 {x: 1}"]
    for i in range(1, 30):
        lines.append(f"l{i}: " + level.format(n=f"l{i}", p=many.format(f"l{i - 1}")))
    (here / "bomb.yaml").write_text(TINY + "\n".join(lines))
    assert "bomb.yaml is too large for a config" in refusal("+recipe=bomb.yaml")


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
    ended = rloo("train", "+recipe=smoke", "--config-dir", "nowhere")
    assert ended.code == 2 and "--config-dir nowhere is not a folder" in ended.err


def test_what_is_wrong_in_a_config_dir_is_named_with_its_line(own: Path) -> None:
    (own / "model" / "mine.yaml").write_text("path: make:tiny\ndtyp: float32\n")
    assert "where    own/model/mine.yaml:2" in refusal("+recipe=one", dirs=("own",))
    (own / "model" / "mine.yaml").write_text("path: [\n")
    assert "where    own/model/mine.yaml:2" in refusal("+recipe=one", dirs=("own",))
    assert "there is no model 'mine'" in refusal("+recipe=smoke", "model=mine")


# Rewards of the user's own: what can be seen without running them.


@pytest.mark.parametrize(
    ("source", "spec", "said"),
    [
        (None, "mine.py:score", ["mine.py does not exist", "looked at "]),
        ("def score(:\n", "mine.py:score", ["mine.py is not valid Python", "where    mine.py:1"]),
        ("def scores(x): ...\n", "mine.py:score", ["has no 'score'", "mine.py:scores"]),
        ("def score(x): ...\n", "mine.py", ["'mine.py' does not name code", "file.py:name"]),
        ("def score(x): ...\n", "mine.py:", ["does not name code"]),
    ],
)
def test_a_reward_that_is_not_there_costs_no_start(
    source: str | None, spec: str, said: list[str], here: Path
) -> None:
    if source is not None:
        (here / "mine.py").write_text(
            "import nothing_of_that_name\n" * ("def s" not in source) + source
        )
    text = refusal("+recipe=smoke", "reward=function", f"reward.function.path={spec}")
    assert text.count("error: ") == 1
    for part in said:
        assert part in text


def test_a_reward_without_its_path_is_asked_for_it() -> None:
    text = refusal("+recipe=smoke", "reward=function")
    assert "reward.function.path has no value" in text and "reward.function.path=VALUE" in text


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
    text = refusal(*words, "+reward.two={type: function}")
    assert "reward.two.path has no value" in text and text.count("error: ") == 1
    text = refusal(*words, "+reward.two={type: function, path: rw.py:second, kwarg: {a: 1}}")
    assert "reward.two.kwarg is not a key" in text and text.count("error: ") == 1


# A run's name that is taken. A run is made up here: its files, without the training.


def make_run(state: str, *words: str, **facts: object) -> Path:
    composed = compose.compose_config(["+recipe=smoke", *words])
    run = check.check_config(composed)
    folder = Path(run.root, run.name)
    launcher.write_attempt_files(ResumePlan(folder), run, composed)
    update_json(folder / "run.json", state=state, **facts)
    return folder


def test_a_finished_run_is_not_done_again(here: Path, rloo: Rloo) -> None:
    make_run("finished")
    ended = rloo("train", "+recipe=smoke")
    assert ended.code == 0 and "runs/smoke is finished: nothing to do" in ended.out
    again = rloo("train", "+recipe=smoke", "logging.samples=0")  # how it is told is not what it is
    assert again.code == 0 and "nothing to do" in again.out


def test_a_name_of_another_config_is_refused_with_the_difference_and_the_choices(
    here: Path, rloo: Rloo
) -> None:
    make_run("finished", fingerprint="x")
    before = rloo.left()
    for word, change in (
        ("algorithm.beta=0.1", "algorithm.beta: 0.05 -> 0.1"),
        ("max_steps=3", "it is finished at step ?, with another length"),
        ("reward=length_chars", "more\n  fix "),  # 10 changes are shown
    ):
        ended = rloo("train", "+recipe=smoke", word)
        assert ended.code == 2 and "runs/smoke " in ended.err and change in ended.err
        assert "or move it away: mv runs/smoke" in ended.err
    assert rloo.left() == before


def test_a_folder_that_is_no_run_is_left_alone(here: Path, rloo: Rloo) -> None:
    (here / "runs" / "smoke").mkdir(parents=True)
    (here / "runs" / "smoke" / "thesis.tex").write_text("")
    ended = rloo("train", "+recipe=smoke")
    assert ended.code == 2 and "it is not a run" in ended.err


def test_a_run_that_ended_before_it_began_is_begun_anew_unasked(here: Path, rloo: Rloo) -> None:
    make_run("failed", pid=2**22 + 1)  # above the largest a process can have
    ended = rloo("train", "+recipe=smoke", "max_steps=1", "logging.samples=0")
    assert ended.code == 0, ended.said
    assert read_json(Path("runs/smoke/run.json"))["attempt"] == 2


def test_two_that_start_at_the_same_moment_do_not_both_get_the_folder(tmp_path: Path) -> None:
    with (
        launcher.lock_folder(tmp_path),
        pytest.raises(ConfigError, match="is being trained"),
        launcher.lock_folder(tmp_path),
    ):
        pass
    with launcher.lock_folder(tmp_path):  # free again
        pass


def test_a_run_that_is_alive_is_left_alone(here: Path) -> None:
    folder = make_run("training")  # by this process
    with pytest.raises(ConfigError, match="is being trained by process"):
        launcher._check_not_running(folder)
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
        assert ended.code == 2 and "looks like a secret" in ended.err
        assert "export " in ended.err
        secret = word.rpartition("=")[2].strip("}").rpartition(":")[2]
        assert secret not in ended.said
        assert rloo.left() == []


def test_one_checkpoint_is_not_enough(rloo_without_torch: Rloo) -> None:
    ended = rloo_without_torch("train", "+recipe=smoke", "checkpoint.keep_last=1")
    assert ended.code == 2 and "checkpoint.keep_last" in ended.err and "2" in ended.err
