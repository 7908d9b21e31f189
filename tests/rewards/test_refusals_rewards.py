"""The scorecard's refusals of rewards (BR), each in the run itself, in-process.

BR-1 and BR-2 are config text and stand in test_refusals_config.py; BR-5's whole process is in
test_run_ends.py; BR-12 is in test_reward_model.py.
"""

import math
import os
import textwrap
import threading
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo
from loop_cases import flat, make, sampled

from rloo_cli.config import registry
from rloo_cli.config.user_code import load_user_code
from rloo_cli.policy import load
from rloo_cli.rewards.engine.failures import RewardFailed
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import ConfigError, DataError, NumbersError
from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.wide

LENIENT = ("reward.function.on_error=none", "reward.function.max_error_rate=1.0")


@pytest.fixture
def run_with(tmp_path: Path):
    """`run_with(source, *words)`: a run whose reward is `f` of a file with this source."""

    def build(source: str, *words: str):
        file = tmp_path / "mine.py"
        file.write_text(textwrap.dedent(source))
        named = ("reward=function", f"reward.function.path={file}:f")
        return make(tmp_path, *named, *words, rewards={})

    build.file = tmp_path / "mine.py"
    return build


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights is an error."""
    monkeypatch.setattr(load, "load_causal_lm", lambda *_: pytest.fail("weights were loaded"))


def failed(run) -> str:
    """What the first step is refused with; the weights stay as they are."""
    before = flat(run)
    with pytest.raises(RewardFailed) as caught:
        sampled(run)
    assert caught.value.code == 5 and (flat(run) == before).all()
    said = str(caught.value)
    assert "reward 'function'" in said and "step 0" in said and "mine.py:" in said
    return said


def test_br_3_a_function_without_kwargs_gets_what_it_names(run_with) -> None:
    run = run_with("def f(completions, answer):\n    return [len(a) for a in answer]\n")
    assert sampled(run).score.tolist()[0][0] > 0


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ("completions, /", "'completions'"),
        ("*arguments", "takes: nothing"),
        ("answer", "takes: answer"),
    ],
)
def test_br_3_a_function_that_cannot_be_called_is_refused(
    parameters: str, key: str, run_with, no_weights
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_with(f"def f({parameters}):\n    return []\n")
    assert "mine.py:1" in assert_refused(caught, 2, key, where="reward.function.path").why


def test_br_4_a_column_that_is_absent_is_found_before_the_model(run_with, no_weights) -> None:
    with pytest.raises(DataError) as caught:
        run_with("def f(completions, nowhere):\n    return []\n")
    assert "task, answer" in assert_refused(caught, 4, "'nowhere'").why


def test_br_5_a_reward_that_raises_shows_the_users_frames_alone(run_with) -> None:
    run = run_with("""
        def inner(text):
            raise ValueError("no score")

        def f(completions, **kwargs):
            return [inner(text) for text in completions]
    """)
    said = failed(run)
    assert "ValueError: no score" in said and "in inner" in said and "rloo_cli" not in said


@pytest.mark.slow_but(
    "[1.0]-returned 1 values for 16 completions",
    "None-returned None (NoneType), not a list",
    "{i: 1.0 for i in range(16)}-(dict), not a list",
    "['1'] * 16-gave '1' (str), not a number",
    "[float('inf')] * 16-gave inf (beyond 1e30)",
    "[10 ** 400] * 16-gave an int (beyond 1e30)",
)
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[1.0]", "returned 1 values for 16 completions"),
        ("[1.0] * 17", "returned 17 values for 16 completions"),
        ("[]", "returned 0 values for 16 completions"),
        ("None", "returned None (NoneType), not a list"),
        ("1.0", "returned 1.0 (float), not a list"),
        ("'x' * 16", "(str), not a list"),
        ("{i: 1.0 for i in range(16)}", "(dict), not a list"),
        ("(1.0 for _ in range(16))", "(generator), not a list"),
        ("[[1.0] for _ in range(16)]", "gave [1.0] (list), not a number"),
        ("['1'] * 16", "gave '1' (str), not a number"),
        ("[1j] * 16", "gave 1j (complex), not a number"),
        ("[float('nan')] * 16", "gave nan"),
        ("[float('inf')] * 16", "gave inf (beyond 1e30)"),
        ("[-float('inf')] * 16", "gave -inf (beyond 1e30)"),
        ("[1e40] * 16", "gave 1e+40 (beyond 1e30)"),
        ("[10 ** 400] * 16", "gave an int (beyond 1e30)"),
    ],
)
def test_br_6_and_7_what_is_no_list_of_finite_numbers_is_refused(
    returned: str, said: str, run_with
) -> None:
    assert said in failed(run_with(f"def f(completions, **kwargs):\n    return {returned}\n"))


NONES = """
def f(completions, trainer_state, **kwargs):
    scores = [float(i) for i in range(len(completions))]
    return [None if {when} else s for i, s in enumerate(scores)]
"""


@pytest.mark.parametrize(
    ("when", "unscored"), [("i == 0", 1), ("i < 4", 4)], ids=["one row", "a whole group"]
)
def test_br_8_rows_without_a_score_are_left_out(when: str, unscored: int, run_with) -> None:
    batch = sampled(run_with(NONES.format(when=when)))
    assert int((~batch.scorable).sum()) == unscored


def test_br_8_a_batch_without_scores_is_a_step_without_an_update(run_with) -> None:
    run = run_with(NONES.format(when="trainer_state.step == 1"), "max_steps=3", *NO_EVAL)
    run_training_loop(run)
    rows = [row for row in run.log.metrics_lines if row.get("step")]
    assert run.state.step == 3 and run.state.updates == 2
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))


NO_EVAL = ("eval.at_start=false", "data.eval_split=null")


def test_br_8_ten_batches_without_scores_stop_the_run(run_with) -> None:
    run = run_with(NONES.format(when="True"), "max_steps=20", *NO_EVAL)
    before = flat(run)
    with pytest.raises(NumbersError) as caught:
        run_training_loop(run)
    assert_refused(caught, 7, "10 steps")
    assert (flat(run) == before).all()


SLEEPS = "import time\ndef f(completions, **kwargs):\n    time.sleep(600)\n"


def test_br_9_a_reward_that_sleeps_for_ever_is_left_behind(run_with) -> None:
    said = failed(run_with(SLEEPS, "reward.function.timeout_s=2"))  # its import counts, too
    assert "no answer within timeout_s = 2 s" in said and "time.sleep(600)" in said


def test_br_9_what_on_error_says_is_done(run_with) -> None:
    batch = sampled(run_with(SLEEPS, "reward.function.timeout_s=2", *LENIENT))
    assert not batch.scorable.any()


@pytest.mark.slow_but(
    "def-sys.exit(0)", "def-exit()", "async def-os._exit(1)", "async def-raise KeyboardInterrupt"
)
@pytest.mark.parametrize(
    "ending",
    ["sys.exit(0)", "os._exit(1)", "os._exit(0)", "exit()", "raise KeyboardInterrupt"],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_br_10_a_reward_cannot_end_the_process(kind: str, ending: str, run_with) -> None:
    source = f"import os, sys\n{kind} f(completions, **kwargs):\n    {ending}\n"
    said = failed(run_with(source))
    assert "must not end" in said and ending in said


def test_br_10_a_child_of_a_reward_may_end_as_it_likes(run_with) -> None:
    run = run_with("""
        import os

        def f(completions, **kwargs):
            child = os.fork()
            if not child:
                os._exit(7)
            return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)
    """)
    assert (sampled(run).score == 7).all()


def test_br_10_a_thread_that_is_killed_is_a_failure(run_with) -> None:
    run = run_with("""
        import ctypes, threading, time

        def f(completions, **kwargs):
            me = ctypes.c_ulong(threading.get_ident())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(me, ctypes.py_object(SystemExit))
            time.sleep(0.1)
            return [0.0] * len(completions)
    """)
    assert "SystemExit" in failed(run)


def test_br_11_async_and_sync_are_mixed(tmp_path: Path) -> None:
    async def late(completions, **_):
        return [1.0 for _ in completions]

    run = make(tmp_path, rewards={"late": late, "now": lambda completions: [2.0] * 16})
    assert (sampled(run).score == 3).all()


def test_br_11_async_that_never_yields_runs_out_of_time(run_with) -> None:
    source = SLEEPS.replace("def f", "async def f")
    # Its import has so many seconds, too, and takes more than one of a busy machine.
    said = failed(run_with(source, "reward.function.timeout_s=3"))
    assert "blocked" in said and "time.sleep(600)" in said


# In their spirit: the file itself.


@pytest.mark.slow_but("a file that sleeps", "interrupt", "deep")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import time\ntime.sleep(20)\n", "timeout_s = 0.5"),
        ("while True: pass\n", "timeout_s = 0.5"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
        ("import os\nos._exit(0)\n", "SystemExit: os._exit(0)"),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("import nothing_of_that_name\n", "'nothing_of_that_name'"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("def g(): g()\ng()\n", "RecursionError"),
    ],
    ids=["a file that sleeps", "a loop", "exit", "os._exit", "interrupt", "import", "1/0", "deep"],
)
def test_a_file_that_cannot_be_imported_is_refused_before_the_model(
    source: str, said: str, run_with, no_weights
) -> None:
    with pytest.raises(ConfigError) as caught:
        limit = 0.5 if "0.5" in said else 30
        run_with(source + "def f(completions): ...\n", f"reward.function.timeout_s={limit}")
    problem = assert_refused(caught, 2, said)
    text = problem.render()
    assert "reward.function.path" in text and "mine.py" in problem.what
    assert "rloo_cli" not in text


def test_where_an_import_cannot_be_interrupted_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.3)\ndef f(completions): ...\n")
    found, spec = [], f"{tmp_path}/slow.py:f"
    work = threading.Thread(target=lambda: found.append(load_user_code(spec, "reward", 0.1)))
    work.start()
    work.join(10)
    assert callable(found[0])


def test_our_own_process_still_ends_with_its_code() -> None:
    child = os.fork()
    if not child:
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_two_files_with_neighbours_of_one_name_get_their_own(tmp_path: Path) -> None:
    found = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "helper.py").write_text(f"VALUE = {value}\n")
        (folder / "mine.py").write_text("import helper\ndef f(): return helper.VALUE\n")
        found.append(registry.load_code(f"{folder}/mine.py:f"))
    assert [f() for f in found] == [1, 2]


@pytest.mark.slow_cases("os.kill(os.getpid(), 9)")
@pytest.mark.parametrize("ending", ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_a_run_whose_reward_ends_its_process_is_no_success(ending: str, rloo: Rloo) -> None:
    (rloo.folder / "mine.py").write_text(f"import os\ndef f(completions):\n    {ending}\n")
    words = ("+recipe=smoke", "reward=function", "reward.function.path=mine.py:f")
    ended = rloo("train", *words, "eval.at_start=false", timeout=120)
    caught = ending.startswith("os._exit")
    assert ended.code == (5 if caught else 6), ended.said
    assert (
        "a reward must not end the process" if caught else "the worker process was killed by SIG"
    ) in ended.said
    assert read_json(rloo.folder / "runs" / "smoke" / "run.json").get("state") != "finished"


def test_what_a_file_prints_is_printed_and_harms_nothing(rloo: Rloo) -> None:
    source = "print('{\"step\": 1}')\ndef f(completions):\n    print('x')\n    return [0.0] * 16\n"
    (rloo.folder / "mine.py").write_text(source)
    words = ("+recipe=smoke", "reward=function", "reward.function.path=mine.py:f", "max_steps=1")
    words = (*words, *NO_EVAL)
    ended = rloo("train", *words)
    assert ended.code == 0, ended.said
    assert '{"step": 1}' in ended.out
