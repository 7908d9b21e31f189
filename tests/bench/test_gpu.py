"""bench/gpu.py without a GPU: how rows end, what is kept, the page; cheap rows are rehearsed."""

import importlib
import inspect
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rloo_cli.distributed.device_peaks import DEVICE_PEAKS
from rloo_cli.generation.vllm import arguments

ROOT = Path(__file__).parents[2]
BENCH, SCRIPT = ROOT / "bench", ROOT / "bench" / "gpu.py"
sys.path.append(str(BENCH))
import gpu  # noqa: E402
import gpu_fakes  # noqa: E402
import gpu_page  # noqa: E402
import gpu_table  # noqa: E402

pytestmark = pytest.mark.process

NAMES = {row.name: row for row in gpu_table.ROWS}


def environment(folder: Path) -> dict[str, str]:
    """The program finds the rows that are not real."""
    path = os.pathsep.join([str(ROOT), str(BENCH), str(ROOT / "tests/support")])
    return os.environ | {"PYTHONPATH": path, "GPU_FAKES_PID": str(folder / "pid")}


def command_of(folder: Path, *words: str) -> list[str]:
    """The command line of a rehearsal of fake rows, whose results are in `folder`."""
    return [sys.executable, str(SCRIPT), "--table", "gpu_fakes", "--rehearse", "--raw",
            str(folder / "raw.jsonl"), "--keep", str(folder / "keep"), *words]  # fmt: skip


def rehearse(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command_of(folder, *words), env=environment(folder), text=True,
                          capture_output=True, timeout=120, cwd=folder)  # fmt: skip


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """The last line of each row."""
    return {row["row"]: row for row in gpu.read_results(folder / "raw.jsonl")}


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or is only waited for."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """Rows that end in every way, once; the folder, and what was said."""
    folder = tmp_path_factory.mktemp("fakes")
    return folder, rehearse(folder)


def test_a_row_that_crashes_or_hangs_costs_no_other_row_anything(fakes):
    folder, ended = fakes
    assert ended.returncode == 1, ended.stderr
    status = {name: row["status"] for name, row in results(folder).items()}
    assert status == {
        "first": "done", "raises": "failed", "crashes": "crashed", "hangs": "hung",
        "cannot": "cannot", "two GPUs": "done", "refuted": "done", "untried": "failed",
        "last": "done",
    }  # fmt: skip
    said = dict(line.split(": ", 1) for line in ended.stdout.splitlines() if ": " in line)
    (bad,) = (names.split(", ") for what, names in said.items() if " 5 failed" in what)
    assert bad == ["raises", "crashes", "hangs", "refuted", "untried"]
    assert "no-such-package" in said["another package"] and "99.0" in said["a later vLLM"]
    assert said["like first"].endswith(" first") and said["first"].startswith("measured in ")


def test_a_row_that_is_cut_keeps_its_finished_rounds(fakes):
    folder, _ = fakes
    found = results(folder)
    assert found["hangs"]["facts"] == {"half": 2} and found["hangs"]["rounds"] == 2
    assert found["hangs"]["why"].endswith(" 3 s")
    assert found["raises"]["facts"] == found["crashes"]["facts"] == {"half": 1}
    assert found["raises"]["why"].startswith("ValueError: ")
    assert found["crashes"]["why"] == "SIGSEGV"


def test_what_a_row_prints_is_kept_and_what_it_started_ends_with_it(fakes):
    folder, ended = fakes
    assert "a last word" in (folder / "keep" / "crashes.txt").read_text()
    assert "a last word" in ended.stdout
    assert all(is_gone(int(pid)) for pid in (folder / "pid").read_text().split())


def test_a_second_start_measures_only_what_is_not_done(fakes):
    folder, _ = fakes
    ended = rehearse(folder, "--rows", "last", "first", "two GPUs")
    assert ended.returncode == 0 and ended.stdout.count("is known already") == 3
    assert ended.stdout.startswith("last:")  # in the order that was asked for
    before = len(gpu.read_results(folder / "raw.jsonl"))
    assert "first: measured" in rehearse(folder, "--again", "--rows", "first").stdout
    assert len(gpu.read_results(folder / "raw.jsonl")) == before + 2
    ended = rehearse(folder, "--rows", "first", "--set", "number=7")
    assert "first: measured" in ended.stdout
    assert results(folder)["first"]["sizes"] == {"number": 7}


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_killing_the_program_loses_no_finished_row_and_leaves_no_process(tmp_path, by):
    words = command_of(tmp_path, "--rows", "first", "hangs")
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL,
                               env=environment(tmp_path) | {"GPU_FAKES_LIMIT": "600"})  # fmt: skip
    until = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith(" "):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(by)
    assert process.wait(30) == (143 if by == signal.SIGTERM else -signal.SIGKILL)
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pid").read_text().split())
    found = results(tmp_path)
    assert found["first"]["status"] == "done" and found["hangs"]["facts"] == {"half": 2}


def test_it_stops_in_time_and_says_what_is_left(tmp_path):
    began = time.monotonic()
    ended = rehearse(tmp_path, "--minutes", "0.04", "--rows", "hangs", "first")
    assert time.monotonic() - began < 30 and ended.returncode == 0
    assert "2 rows: hangs, first;" in ended.stdout
    assert results(tmp_path)["hangs"]["status"] == "cut"
    assert results(tmp_path)["hangs"]["rounds"] == 2


def test_a_name_or_a_size_that_no_row_has_is_refused(tmp_path):
    ended = rehearse(tmp_path, "--rows", "firts")
    assert ended.returncode == 2 and "not a row: 'firts'" in ended.stderr
    ended = rehearse(tmp_path, "--rows", "first", "--set", "rounds=1")
    assert ended.returncode == 2 and "has the size 'rounds'" in ended.stderr


def test_without_a_gpu_it_says_so_and_exits_3(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "visible_gpus", list)
    raw = tmp_path / "raw.jsonl"
    assert gpu.main(["--rows", "machine", "--raw", str(raw)]) == 3
    assert capsys.readouterr() == ("", gpu.NO_GPU + "\n") and not raw.exists()


def test_with_a_gpu_its_rows_are_kept_and_the_page_is_written(tmp_path, monkeypatch, capfd):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ["GPU-1"])
    monkeypatch.setattr(gpu, "gpu_name", lambda: "H100")
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    raw, page = tmp_path / "raw.jsonl", tmp_path / "gpu.md"
    words = ["--table", "gpu_fakes", "--raw", str(raw), "--page", str(page), "--rows"]
    assert gpu.main([*words, "first", "raises", "two GPUs", "untried"]) == 1
    found = results(tmp_path)
    assert found["first"]["facts"] == {"device": "cuda", "dtype": "bfloat16", "number": 1}
    assert found["first"]["machine"] == "1 x H100" and not found["first"]["rehearsed"]
    said = capfd.readouterr().out
    # what is refused until it works may fail
    assert "refuted: raises" in said and "two GPUs: cannot" in said
    text = page.read_text()
    assert "| first | does it | without vLLM |  | **measured**: device cuda" in text
    assert gpu.main([*words, "first"]) == 0


def test_a_result_is_known_by_its_sizes_machine_versions_and_code(monkeypatch):
    row = NAMES["train phase W5"]
    versions = {"torch": "2.13", "trl": "1.16", "vllm": "0.32"}
    machine = gpu.Machine("1 x H100", 1, versions, False)
    known = machine.result_key(row, {}) | {"status": "done"}
    assert gpu.is_known([known], machine.result_key(row, {"turns": 1}))  # it has no turns
    assert not gpu.is_known([known | {"status": "hung"}], machine.result_key(row, {}))
    assert not gpu.is_known([known], machine.result_key(row, {"rounds": 1}))
    for other in (
        gpu.Machine("1 x H200", 1, versions, False), gpu.Machine("1 x H100", 1, versions, True),
        gpu.Machine("1 x H100", 1, versions | {"torch": "2.11"}, False),
        gpu.Machine("1 x H100", 1, versions | {"trl": "1.17"}, False),
    ):  # fmt: skip
        assert not gpu.is_known([known], other.result_key(row, {}))
    newer = gpu.Machine("1 x H100", 1, versions | {"vllm": "0.33"}, False)
    assert gpu.is_known([known], newer.result_key(row, {}))  # this row needs no vLLM
    monkeypatch.setattr(gpu, "code_digest", lambda parts: "of other code")
    assert not gpu.is_known([known], machine.result_key(row, {}))


def test_the_digest_of_a_row_is_of_the_files_that_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    for path in ("policy/a.py", "data/b.py"):
        file = tmp_path / "rloo_cli" / path
        file.parent.mkdir(parents=True)
        file.write_text("one")
    policy, one = gpu.code_digest(("policy",)), gpu.code_digest(("data/b.py",))
    (tmp_path / "rloo_cli/policy/a.py").write_text("other")
    assert gpu.code_digest(("policy",)) != policy and gpu.code_digest(("data/b.py",)) == one
    assert gpu.code_digest(()) == ""


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_whole(tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"row": "a"}\n{"row": "b", "sta')
    gpu.append_result(raw, {"row": "c"})
    assert gpu.read_results(raw) == [{"row": "a"}, {"row": "c"}]


def test_every_row_names_a_function_files_and_sizes_that_there_are():
    assert len(NAMES) == len(gpu_table.ROWS)
    for row in gpu_table.ROWS:
        module, _, function = row.work.partition(":")
        text = (BENCH / f"{module}.py").read_text()
        assert f"def {function}(device: str, dtype: str, sizes: Facts)" in text, row.name
        assert row.tiny.keys() <= row.sizes.keys(), row.name
        assert all((ROOT / "rloo_cli" / part).exists() for part in row.code), row.name
    assert all(row.work.startswith("gpu_fakes:") for row in gpu_fakes.ROWS)


def test_every_refusal_until_proven_has_a_row():
    source = inspect.getsource(arguments._untested_problems)
    rows = [row for row in gpu_table.ROWS if row.refusal]
    assert len(re.findall(r"yield (?:Problem|value_problem)\(", source)) == len(rows)
    assert all(row.refusal in source for row in rows)


def test_the_page_is_made_from_the_results():
    ended = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_a_page_that_says_something_else_is_found(tmp_path, capsys):
    page = tmp_path / "gpu.md"
    page.write_text((ROOT / "docs/results/gpu.md").read_text() + "more\n")
    assert gpu.main(["--check", "--page", str(page)]) == 1
    assert gpu.main(["--make-page", "--page", str(page)]) == 0
    assert gpu.main(["--check", "--page", str(page)]) == 0
    assert str(page) in capsys.readouterr().out


def result_of(name: str, **more: Any) -> dict[str, Any]:
    """A result of a row on a machine that is not here."""
    row = NAMES.get(name, gpu_table.GpuRow(name, "", ""))
    machine = gpu.Machine("1 x H100", 1, {"torch": "2.13", "vllm": "0.22.1"}, False)
    base = {"status": "done", "verdict": "measured", "facts": {}, "seconds": 3.0}
    return machine.result_key(row, {}) | base | {"date": "2026-01-02T03:04:05"} | more


def test_the_page_says_what_was_measured_what_was_not_and_where_rloo_loses():
    table = [{"tool": "trl", "ratio": 0.8}, {"tool": "rloo", "MFU": 0.4}]
    step = result_of("whole step W8", facts={"ratio_trl": 0.8, "table": table})
    hung = result_of("rollout W8", status="hung", why="had not | ended", rounds=1)
    text = gpu_page.render_page(gpu_table.ROWS, [
        step, hung, result_of("machine", rehearsed=True), result_of("of an older program"),
        result_of("head float32", beside=True, facts={"off": 0.5, "table": [{"head": "kept"}]}),
    ])  # fmt: skip
    lines = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert NAMES.keys() <= lines.keys()
    assert "| 0.22.1, V1 (GPT-NeoX) | floor: 1.26 s; goal: 2.4 s" in lines["whole step W8"]
    assert "ratio_trl 0.8 **`rloo` loses**" in lines["whole step W8"]
    assert "| trl | 0.8 **`rloo` loses** |" in text
    assert "**hung**: had not / ended" in lines["rollout W8"]
    assert "not measured yet" in lines["machine"]
    assert "off 0.5; beside " in lines["head float32"]
    assert "| head |" not in text and "an older program: **measured**" in text
    first = " ".join(text.partition("-->")[2].partition("One command")[0].split())
    measured, _, unmeasured = first.partition("Not measured yet")
    assert "1 x H100 with vLLM 0.22.1: " in measured and "against TRL" in measured
    assert "run of `rloo train`" in unmeasured
    assert "vLLM 0.32" in first and f"{DEVICE_PEAKS['H100'].flops_per_s / 1e12:.0f} TFLOP/s" in text


def test_a_whole_result_replaces_unfinished_ones_of_the_row_and_not_the_other_way_round():
    done, part = result_of("real run"), result_of("real run", status="part")
    failed = result_of("real run", status="failed", why="later")
    latest = gpu_page.latest_results
    assert latest([failed, done, part]) == [done] and latest([done, failed]) == [failed]
    assert latest([done, result_of("real run", status="cannot", why="no")]) == [done]


QUICK = ["machine", "order of waits", "head float32", "head bfloat16", "shared float32",
         "packed bfloat16", "padded float32", "optimizer", "memory, plain",
         "switch: micro-batch tokens"]  # fmt: skip


def call_row(name: str, **sizes: Any) -> list[dict[str, Any]]:
    """The facts of a row with its tiny sizes, in this process."""
    row = NAMES[name]
    module, _, function = row.work.partition(":")
    work = getattr(importlib.import_module(module), function)
    return list(work("cpu", row.dtype, row.sizes | row.tiny | sizes))


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_row_is_rehearsed(name):
    facts = call_row(name)
    assert facts and all(found["verdict"] in ("measured", "confirmed") for found in facts)


@pytest.fixture(scope="module")
def phase():
    """A tiny train phase of two rounds: the facts after the comparison and after each."""
    return call_row("train phase W5", rounds=2)


def test_a_train_phase_yields_its_facts_after_every_round(phase):
    assert [found["rounds"] for found in phase] == [0, 1, 2]
    assert all(found["verdict"] == "confirmed" for found in phase)
    rows = {row["variant"]: row for row in phase[-1]["table"]}
    assert list(rows) == ["float32", "trl", "trl_best", "packed", "shared_recomputed", "shared"]
    ours = min(rows["shared"]["ms"], rows["shared_recomputed"]["ms"])
    assert math.isclose(phase[-1]["ratio_trl"], rows["trl"]["ms"] / ours)
    assert "ms" not in rows["float32"]


def test_gradients_are_compared_with_float32_and_with_trl(phase):
    rows = {row["variant"]: row for row in phase[0]["table"]}
    for name in ("packed", "shared_recomputed", "shared"):
        assert 0 < rows[name]["gradient off TRL"] < 2e-5
        assert 0 < rows[name]["off float32"] < 2e-5
    assert rows["trl"]["off float32"] is not None
    assert rows["shared"]["level"] == "shared, head fused"


@pytest.mark.parametrize("base", ["trl", "float32"])
def test_a_gradient_that_is_off_is_refuted(base):
    gpu_phase = importlib.import_module("gpu_phase")
    bench = object.__new__(gpu_phase.PhaseBench)
    found = {n: gpu_phase.Measured(v, 1) for n, v in gpu_phase.VARIANTS.items()}
    for measured in found.values():
        measured.cost, measured.off_trl, measured.off_float32 = True, 0.01, 0.01
    bench.found = found
    assert bench.gradients_match("bfloat16") and not bench.gradients_match("float32")
    for wrong in (0.3, None):
        setattr(found["shared"], f"off_{base}", wrong)
        assert not bench.gradients_match("bfloat16")


def test_micro_batches_of_both_tools_hold_as_many_tokens(monkeypatch):
    gpu_phase, models = importlib.import_module("gpu_phase"), importlib.import_module("gpu_models")
    shape = models.tiny_shape(models.SHAPES["W7"])
    batch, cpu = models.draw_batch(shape), torch.device("cpu")
    ours = gpu_phase.RlooPhase(gpu_phase.VARIANTS["shared"], shape, cpu)
    spans = ours.micro_batches(batch, 90)
    assert [i for span in spans for i in span] == list(range(len(batch.groups)))
    held = [sum(p + sum(cs) for p, cs in batch.lengths[span.start : span.stop]) for span in spans]
    assert all(size <= 90 for size in held) and max(held) > 45
    theirs, seen = gpu_phase.TrlPhase(gpu_phase.VARIANTS["trl"], shape, cpu), []
    plain = theirs.logp

    def logp(model, rows):
        seen.append(theirs.ids[rows].numel())
        return plain(model, rows)

    monkeypatch.setattr(theirs, "logp", logp)
    theirs.run(batch, 90)
    assert all(size <= 90 for size in seen) and max(seen) > 45


def test_a_micro_batch_that_does_not_fit_is_halved_and_the_smallest_is_left_out():
    gpu_phase, models = importlib.import_module("gpu_phase"), importlib.import_module("gpu_models")
    shape = models.tiny_shape(models.SHAPES["W5"])
    bench = gpu_phase.PhaseBench(shape, ["trl"], torch.device("cpu"), 256)

    class Phase:
        model = torch.nn.Linear(1, 1)
        fits = 64

        def run(self, batch, tokens):
            if tokens > self.fits:
                raise torch.OutOfMemoryError
            return torch.zeros(1)

    found = bench.found["trl"]
    assert bench.run_phase(Phase(), found, bench.batch) and found.tokens == 64
    Phase.fits = 0
    assert not bench.run_phase(Phase(), found, bench.batch) and found.tokens == 0


def test_the_work_of_a_batch_is_what_can_be_counted_by_hand():
    gpu_phase, models = importlib.import_module("gpu_phase"), importlib.import_module("gpu_models")
    cost = gpu_phase.ForwardCost(10, 1, 2, 3, 5)
    group = models.draw_batch(models.replace(
        models.SHAPES["W5"], prompt=(4, 4), completion=(3, 3), k=2, prompts=1
    ))  # fmt: skip
    head = 2.0 * 3 * 5 * 6
    work = {n: gpu_phase.forward_flops(cost, group, n) for n in ("padded", "packed", "shared")}
    assert work["padded"] == (20.0 * 14 + 8 * 49, head)
    assert work["packed"] == (20.0 * 12 + 8 * 36, head)
    assert work["shared"] == (20.0 * 8 + 8 * (8 + 2 * (8 + 2)), head)
    assert gpu_phase.phase_flops(cost, group, "padded") == 5 * sum(work["padded"])
    assert gpu_phase.phase_flops(cost, group, "shared", 1) == 3 * sum(work["shared"])


def test_without_trl_its_head_is_computed_in_chunks_with_the_same_numbers(monkeypatch):
    gpu_phase = importlib.import_module("gpu_phase")
    monkeypatch.setattr(gpu_phase, "add_fused_lm_head", None)
    monkeypatch.setattr(gpu_phase, "CHUNK", 7)
    (facts,) = call_row("train phase W7", rounds=0)
    assert facts["verdict"] == "confirmed"


def test_a_turn_whose_process_fails_keeps_the_other_tools_steps(monkeypatch):
    whole = importlib.import_module("gpu_whole")
    cost = {"layer_params": 10, "num_layers": 1, "attention_width": 2, "hidden_size": 3,
            "vocab_size": 5}  # fmt: skip
    step = {"seconds": 2.0, "split": {}, "peak_gb": None, "settings": "", "cost": cost,
            "product": 1e9, "bandwidth": 1e9}  # fmt: skip
    tried = []

    def turn(tool, spec, folder):
        tried.append((tool, spec.get("micro")))
        if tool == "trl_best":
            raise RuntimeError("trl_best: exit code 1")
        if tool == "trl" and spec["micro"] > 2:
            raise whole.MemoryIsFull
        return [step | {"seconds": 6.0 if tool == "trl" else 2.0}]

    monkeypatch.setattr(whole, "take_turn", turn)
    monkeypatch.setattr(whole, "why_without_trl", lambda sampler: "")
    facts = call_row("whole step W5, no vLLM", turns=2)
    assert facts[-1]["ratio_trl"] == 3.0 and facts[0]["ratio_trl"] is None
    assert facts[-1]["without_trl_best"] == "trl_best: exit code 1"
    assert [micro for tool, micro in tried if tool == "trl"] == [8, 4, 2, 2]
    assert [tool for tool, _ in tried if tool != "trl"] == ["rloo", "trl_best", "rloo"]


@pytest.mark.trl
def test_the_settings_of_trls_sampler_are_keys_that_it_has():
    trl = pytest.importorskip("trl")
    side = importlib.import_module("side_trl")
    with_vllm = side.sampler(53, 553, 0.3)
    known = {*trl.RLOOConfig.__dataclass_fields__}
    assert {*with_vllm, *side.sampler(53, 553, None)} <= known
    assert {"cache_implementation", "use_liger_kernel"} <= known
    assert with_vllm["use_vllm"] and with_vllm["vllm_gpu_memory_utilization"] == 0.3


def test_both_tools_give_the_engine_settings_that_capture_the_rows_of_a_step():
    whole, models = importlib.import_module("gpu_whole"), importlib.import_module("gpu_models")
    w8, w10 = (models.WHOLE_STEPS[name][0] for name in ("W8", "W10"))
    assert whole.engine_settings(w8)["cudagraph_capture_sizes"] == [8, 32, 128, 256, 512]
    assert whole.engine_settings(w10)["cudagraph_capture_sizes"][-1] == w10.batch == 1024
    assert whole.engine_settings(w8)["mode"] == 0
    spec = {"beta": 0.0, "tokens": 64, "sampler": "vllm", "share": 0.3}
    keys = whole.rloo_keys(spec, w8, Path("x"))
    settings = yaml.safe_load(keys[-1].partition("=")[2].replace(":", ": "))
    assert settings == whole.engine_settings(w8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["real run", "ddp"])
def test_whole_runs_are_rehearsed(name):
    assert call_row(name)[-1]["verdict"] == "confirmed"
