"""What is written: the final model, whole files, the clock's seconds, and sampling seeds."""

import contextlib
import json
import os
import resource
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
from policy_cases import fresh

from rloo_cli.checkpoint import export
from rloo_cli.config import check as config_check
from rloo_cli.config.compose import compose_config
from rloo_cli.data.synthetic import tiny
from rloo_cli.launch.preflight import check_machine
from rloo_cli.utils import files
from rloo_cli.utils.child_process import is_process_alive, process_start_time
from rloo_cli.utils.errors import MachineError, Problem, Stopped, StorageError
from rloo_cli.utils.rng import sampling_seed
from rloo_cli.utils.timers import StepTimer


def model():
    made = fresh(vocab_size=258)
    made.generation_config.eos_token_id = [1, 7]
    return made


def test_the_final_model_is_loaded_as_any_other(tmp_path):
    made, tokens = model(), tiny.tiny_tokenizer()
    final = export.save_final(made, tokens, tmp_path)
    assert final == tmp_path / "final" and os.listdir(tmp_path) == ["final"]
    again = transformers.AutoModelForCausalLM.from_pretrained(final)
    assert type(again) is type(made)
    for key, value in made.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    assert again.generation_config.eos_token_id == [1, 7]
    found = transformers.AutoTokenizer.from_pretrained(final)
    assert found.chat_template == tiny.TEMPLATE
    assert found("What?")["input_ids"] == tokens("What?")["input_ids"]
    assert (found.pad_token_id, found.eos_token_id) == (0, 1)


def test_the_final_model_keeps_its_dtype(tmp_path):
    final = export.save_final(model().to(torch.bfloat16), tiny.tiny_tokenizer(), tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(final).dtype is torch.bfloat16


@pytest.mark.parametrize("flags", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 3}])
def test_sampling_flags_that_load_but_do_not_save_cost_no_model(flags, tmp_path):
    made = model()
    for name, value in flags.items():
        setattr(made.generation_config, name, value)
    with pytest.raises(ValueError, match="do_sample"):
        made.save_pretrained(tmp_path / "theirs")
    final = export.save_final(made, tiny.tiny_tokenizer(), tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(final).generation_config
    assert {name: getattr(again, name) for name in flags} == flags and again.do_sample


def fails(tmp_path, made=None, tokens=None):
    with pytest.raises(StorageError) as caught:
        export.save_final(made or model(), tokens or tiny.tiny_tokenizer(), tmp_path)
    assert caught.value.code == 8
    assert os.listdir(tmp_path) == []
    return str(caught.value)


@contextlib.contextmanager
def limit(size):
    """A largest size of file: the nearest to a full disk without one.

    Not a fixture: pytest writes its own report before it tears one down.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


def test_weights_that_do_not_fit_on_the_disk_are_a_failed_save(tmp_path):
    with limit(20_000):
        message = fails(tmp_path)
    assert f"{tmp_path / 'final'}" in message
    assert "File too large" in message and "GB" in message


def test_a_tokenizer_that_does_not_fit_on_the_disk_is_a_failed_save(tmp_path):
    made = SimpleNamespace(can_generate=lambda: False, save_pretrained=lambda path: None)
    with limit(2_000):
        message = fails(tmp_path, made)
    assert "File too large" in message


def test_a_second_end_takes_the_place_of_the_first(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final/old").write_text("x")
    export.save_final(model(), tiny.tiny_tokenizer(), tmp_path)
    assert os.listdir(tmp_path) == ["final"] and "old" not in os.listdir(tmp_path / "final")


@pytest.mark.parametrize("error", [Stopped(Problem("stopped")), KeyboardInterrupt()])
def test_a_save_that_is_stopped_says_so_and_leaves_nothing(error, tmp_path):
    tokens = tiny.tiny_tokenizer()

    def stop(path):
        raise error

    tokens.save_pretrained = stop
    with pytest.raises(type(error)):
        export.save_final(model(), tokens, tmp_path)
    assert os.listdir(tmp_path) == []


def test_half_of_an_earlier_save_is_no_part_of_this_one(tmp_path):
    (tmp_path / ".tmp-final-a1").mkdir()
    (tmp_path / ".tmp-final-a1/old").write_text("x")
    assert "old" not in os.listdir(export.save_final(model(), tiny.tiny_tokenizer(), tmp_path))


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, named = [], []
    monkeypatch.setattr(export, "fsync_path", lambda path: synced.append((path.name, bool(named))))
    rename = type(tmp_path).rename
    monkeypatch.setattr(type(tmp_path), "rename", lambda a, b: named.append(b.name) or rename(a, b))
    final = export.save_final(model(), tiny.tiny_tokenizer(), tmp_path)
    before = {name for name, late in synced if not late}
    assert {*os.listdir(final), ".tmp-final-a1"} <= before
    assert (tmp_path.name, True) in synced


def test_a_file_is_written_whole_and_its_folder_made(tmp_path):
    files.write_text(tmp_path / "a/b/c.txt", "one")
    files.write_text(tmp_path / "a/b/c.txt", "two")
    assert (tmp_path / "a/b/c.txt").read_text() == "two"
    assert os.listdir(tmp_path / "a/b") == ["c.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(call, tmp_path, monkeypatch):
    files.write_text(tmp_path / "c.txt", "old")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no space"):
        files.write_text(tmp_path / "c.txt", "new" * 10_000)
    assert (tmp_path / "c.txt").read_text() == "old" and os.listdir(tmp_path) == ["c.txt"]


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    files.write_text(tmp_path / "c.txt", "old")
    seen, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda f: seen.append((tmp_path / "c.txt").read_text()) or fsync(f)
    )
    files.write_text(tmp_path / "c.txt", "new")
    assert seen == ["old"]


def test_json_is_strict_and_a_refused_one_changes_nothing(tmp_path):
    path = tmp_path / "a.json"
    assert files.read_json(path) == {}
    files.write_json(path, {"a": 1})
    files.update_json(path, b=[2])
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            files.update_json(path, c=bad)
    assert json.loads(path.read_text()) == files.read_json(path) == {"a": 1, "b": [2]}


class Hands:
    """A clock's hands, moved by us: `time.perf_counter` without time."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def hands(monkeypatch):
    return Hands(monkeypatch)


def test_an_inner_phase_is_not_counted_twice(hands):
    heard = []
    clock = StepTimer(heard.append)
    with clock.phase("outer"):
        hands.now += 1
        with clock.phase("inner"):
            hands.now += 2
            with clock.phase("innermost"):
                hands.now += 4
        with clock.phase("inner"):
            hands.now += 8
        hands.now += 16
    hands.now += 32
    times = clock.lap()
    assert times == {
        "step_time": 63, "time/outer": 17, "time/inner": 10, "time/innermost": 4, "time/idle": 32,
    }  # fmt: skip
    assert heard == ["outer", "inner", "innermost", "inner"]


def test_the_times_of_every_step_add_up_to_it(hands):
    clock = StepTimer()
    for step in range(3):
        for name in ("a", "b", "a"):
            with clock.phase(name):
                hands.now += step + 0.25
        hands.now += 0.5
        times = clock.lap()
        total = times.pop("step_time")
        assert total == 3 * (step + 0.25) + 0.5 == sum(times.values())
    assert clock.lap() == {"step_time": 0, "time/idle": 0}
    assert clock.elapsed() == hands.now - 100


def test_a_phase_that_fails_is_timed_all_the_same(hands):
    clock = StepTimer()
    with pytest.raises(KeyError), clock.phase("a"):
        hands.now += 3
        raise KeyError
    assert clock.lap()["time/a"] == 3


def test_the_seeds_of_completions_are_those_of_the_specification():
    assert sampling_seed(1, "train", 0, 0, 0) == 3953939376909200474
    assert sampling_seed(1, "train", 0, 0, 1) == 4924991672376659186


def test_no_two_completions_have_the_same_seed():
    seeds = {
        sampling_seed(seed, phase, step, prompt, k, turn)
        for seed in (1, 2) for phase in ("train", "eval") for step in range(4)
        for prompt in range(12) for k in range(4) for turn in (0, 1)
    }  # fmt: skip
    assert len(seeds) == 2 * 2 * 4 * 12 * 4 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def wanted(root, *types):
    rewards = ",".join(types or ["length_tokens"])
    return config_check.check_config(
        compose_config(["+recipe=smoke", f"root='{root}'", f"reward=[{rewards}]"])
    )


def test_a_machine_that_has_everything_passes(tmp_path):
    check_machine(wanted(tmp_path / "not/yet/there", "accuracy", "length_tokens"))


def test_everything_that_the_machine_lacks_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path))  # one that is there
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(MachineError) as caught:
        check_machine(wanted(tmp_path / "a/b", "accuracy", "length_tokens"))
    message = str(caught.value)
    assert len(caught.value.problems) == 2 and caught.value.code == 3
    assert "pip install 'rloo-cli[math]'" in message
    assert "cannot be written" in message and f"looked at {tmp_path}" in message


def test_a_disk_that_is_almost_full_is_refused(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=1e6, total=1e9)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match="100 MB"):
        check_machine(wanted(tmp_path))


def test_a_process_is_alive_while_it_is_the_same_one():
    facts = {"pid": os.getpid(), "pid_started": process_start_time(os.getpid())}
    assert is_process_alive(facts)
    assert not is_process_alive(facts | {"pid_started": "1"})  # the number went to another process
    assert not is_process_alive({"pid": 2**22 + 1, "pid_started": ""}) and not is_process_alive({})
    child = os.fork()
    if not child:
        os._exit(0)
    deadline = time.monotonic() + 10
    while process_start_time(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_start_time(child) == ""  # a zombie
    os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["accuracy", "reasoning_accuracy", "cosine_length"])
def test_a_reward_whose_package_is_missing_is_refused_before_the_run(name, tmp_path, monkeypatch):
    missing = MachineError(Problem("math-verify is not installed"))

    def require():
        raise missing

    monkeypatch.setattr("rloo_cli.rewards.common.math_equal.require_math_verify", require)
    with pytest.raises(MachineError) as caught:
        check_machine(wanted(tmp_path, name))
    assert caught.value.problems[0].where == f"reward.{name}"
