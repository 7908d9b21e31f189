"""bench/gpu_proof.py without a GPU: rows that fail cost others nothing, all are rehearsed."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rloo_cli.generation.vllm import arguments

ROOT = Path(__file__).parents[2]
BENCH, SCRIPT = ROOT / "bench", ROOT / "bench" / "gpu_proof.py"
sys.path.append(str(BENCH))
import gpu_proof  # noqa: E402
import proof_child  # noqa: E402
import proof_fakes  # noqa: E402
import proof_page  # noqa: E402
import proof_rows  # noqa: E402


def environment(folder: Path) -> dict[str, str]:
    """Of the program: it finds the rows that are not real, and no other cache."""
    found = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCH), str(ROOT / "tests/support")])}
    found |= {"PROOF_FAKES_PID": str(folder / "pid"), "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | found


def run(folder: Path, *words: str, listing: str = "proof_fakes", limit: float = 120):
    """The program, with its raw results in `folder`."""
    page, raw = folder / "gpu.md", folder / "raw.jsonl"
    given = ["--listing", listing, "--raw", str(raw), "--page", str(page), *words]
    return subprocess.run(
        [sys.executable, str(SCRIPT), *given], env=environment(folder), capture_output=True,
        text=True, timeout=limit, cwd=folder,
    )  # fmt: skip


def results(folder: Path) -> dict[str, dict]:
    """The latest result of each row."""
    lines = (folder / "raw.jsonl").read_text().splitlines()
    return {row["row"]: row for row in map(json.loads, lines)}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """Rows that end in every way, once; the folder, and what was said."""
    folder = tmp_path_factory.mktemp("fakes")
    return folder, run(folder, "--rehearse")


def test_a_row_that_crashes_hangs_or_is_out_of_memory_costs_no_other_row_anything(fakes):
    folder, ended = fakes
    found = results(folder)
    assert ended.returncode == 1, ended.stderr
    assert [row.name for row in proof_fakes.ROWS if row.name not in found] == []
    status = {name: row["status"] for name, row in found.items()}
    assert status == {
        "first": "done", "raises": "failed", "crashes": "crashed", "hangs": "hung",
        "full": "out of memory", "cannot": "cannot", "two GPUs": "done", "a later vLLM": "cannot",
        "another package": "cannot", "refuted": "done",
        "untried": "failed", "last": "done",
    }  # fmt: skip
    assert found["last"]["facts"]["number"] == 2 and found["last"]["verdict"] == "measured"
    assert found["raises"]["why"] == "ValueError: of its own"
    assert "SIGSEGV" in found["crashes"]["why"] and "a last word" in found["crashes"]["tail"]
    assert "5 failed or were refuted: raises, crashes, hangs, full, untried" in ended.stdout


def test_what_a_row_left_running_is_ended_with_it(fakes):
    folder, _ = fakes
    left = int((folder / "pid").read_text())
    assert not Path(f"/proc/{left}").exists() or "Z" in state(left)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_rehearsal_says_what_a_cpu_leaves_out(fakes):
    _, ended = fakes
    assert re.search(r"^first: measured in .* s \(without what a CPU lacks\)$", ended.stdout, re.M)


def test_a_row_that_cannot_run_says_why_and_is_no_failure(fakes):
    folder, _ = fakes
    found = results(folder)
    vllm = arguments.installed_vllm_version() or "(none)"
    assert found["cannot"]["why"] == "not with vLLM 0.22.1: it has no labels"
    reason = "it has no labels" if arguments.installed_vllm_version() else "it needs 99.0 or later"
    assert found["a later vLLM"]["why"] == f"not with vLLM {vllm}: {reason}"
    assert found["another package"]["why"] == "needs no-such-package, which is not installed"
    assert not any(gpu_proof.is_bad(row) for row in found.values() if row["status"] == "cannot")


def test_a_second_start_does_nothing_again_and_again_does(fakes):
    folder, _ = fakes
    before = (folder / "raw.jsonl").read_text()
    ended = run(folder, "--rehearse")
    assert (folder / "raw.jsonl").read_text() == before
    assert ended.returncode == 0 and ended.stdout.count("is known already") == 10, ended.stdout
    assert run(folder, "--rehearse", "--again", "--rows", "first").returncode == 0
    lines = (folder / "raw.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["row"] == "first" for line in lines) == 2


def test_sizes_that_a_row_has_may_be_others_and_are_another_result(tmp_path):
    ended = run(tmp_path, "--rehearse", "--rows", "first", "raises", "--set", "number=7", "no=1")
    assert "first: measured" in ended.stdout, ended.stdout + ended.stderr
    found = results(tmp_path)
    assert found["first"]["facts"]["number"] == 7
    assert found["first"]["changed"] == {"number": 7} and not found["raises"]["changed"]
    assert "is known already" not in run(tmp_path, "--rehearse", "--rows", "first").stdout
    assert results(tmp_path)["first"]["facts"]["number"] == 1


def test_the_short_rows_are_rows_and_change_only_what_those_have():
    rows = {row.name: row for row in proof_rows.ROWS}
    for name, sizes in proof_rows.SHORT.items():
        assert set(sizes) <= set(rows[name].sizes), name
        place = gpu_proof.Place("1 x H100", 1, {}, "abc", False, {"no": 1}, short=True)
        assert place.key(rows[name])["changed"] == sizes
        assert place.limit(rows[name]) <= gpu_proof.SHORT_ROW_S
    place = gpu_proof.Place("1 x H100", 1, {}, "abc", False, {"rounds": 9}, short=True)
    assert place.key(rows["train phase W5"])["changed"] == {"prompts": 16, "rounds": 9}


def test_a_row_that_ran_beside_others_is_shown_without_its_times():
    row = proof_rows.ROWS[2]
    place = gpu_proof.Place("1 x H100", 1, {"torch": "2.13"}, "abc", False)
    facts = {"off": 1e-7, "table": [{"head": "kept", "ms": 3.0}]}
    found = place.key(row) | {"status": "done", "verdict": "confirmed", "facts": facts}
    found |= {"seconds": 2.0, "date": "2026-11-27T00:00:00", "note": "and a note"}
    assert "| head | ms |" in proof_page.page(proof_rows.ROWS, [found])
    page = proof_page.page(proof_rows.ROWS, [found | {"beside": True}])
    assert "| head | ms |" not in page and "so without times; and a note" in page


def test_another_commit_machine_or_version_is_done_anew():
    row = proof_fakes.ROWS[0]
    place = gpu_proof.Place("1 x H100", 1, {"torch": "2.13", "vllm": "0.32"}, "abc", False)
    known = [place.key(row) | {"status": "done"}]
    assert gpu_proof.is_known(known, place.key(row))
    others = {
        "commit": "abd", "machine": "2 x H100", "versions": {"torch": "2.11"}, "rehearse": True
    }  # fmt: skip
    for name, value in others.items():
        other = gpu_proof.Place(**{**vars(place), name: value})
        assert not gpu_proof.is_known(known, other.key(row)), name
    newer = gpu_proof.Place(**{**vars(place), "versions": {"torch": "2.13", "vllm": "0.33"}})
    assert gpu_proof.is_known(known, newer.key(row))  # this row needs no vLLM


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_whole(tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"row": "a"}\n{"row": "b", "sta')
    gpu_proof.append(raw, {"row": "c"})
    assert gpu_proof.read(raw) == [{"row": "a"}, {"row": "c"}]


def test_it_stops_in_time_and_keeps_nothing_of_the_row_that_was_cut_off(tmp_path):
    began = time.monotonic()
    # The row may take 4 s: it is begun with 3 s left, and cut off.
    ended = run(tmp_path, "--rehearse", "--minutes", "0.05", "--rows", "hangs")
    assert time.monotonic() - began < 30
    assert ended.returncode == 0 and "start it again" in ended.stdout, ended.stdout
    assert not (tmp_path / "raw.jsonl").exists()
    ended = run(tmp_path, "--rehearse", "--minutes", "0")
    assert "no time for" in ended.stdout
    assert {row["status"] for row in results(tmp_path).values()} == {"cannot"}


def test_what_was_started_ends_with_the_program(tmp_path):
    given = ["--listing", "proof_fakes", "--rehearse", "--rows", "hangs", "--raw"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *given, str(tmp_path / "raw.jsonl")],
        env=environment(tmp_path) | {"PROOF_FAKES_LIMIT": "600"}, cwd=tmp_path,
    )  # fmt: skip
    until = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) == 143
    left = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{left}").exists() or "Z" in state(left)


def test_without_a_gpu_it_says_so_and_exits_3(tmp_path):
    ended = run(tmp_path)
    assert ended.returncode == 3 and not ended.stdout
    assert ended.stderr == gpu_proof.NO_GPU + "\n"
    assert not (tmp_path / "raw.jsonl").exists() and not (tmp_path / "gpu.md").exists()


def test_with_a_gpu_its_rows_are_kept_and_the_page_is_written(tmp_path, monkeypatch, capfd):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_proof, "visible_gpus", lambda: ["GPU-1"])
    monkeypatch.setattr(gpu_proof, "gpu_name", lambda: "H100")
    monkeypatch.setattr(gpu_proof.signal, "signal", lambda *_: None)
    words = ["--listing", "proof_fakes", "--raw", str(tmp_path / "raw.jsonl")]
    words += [
        "--page",
        str(tmp_path / "gpu.md"),
        "--rows",
        "first",
        "raises",
        "two GPUs",
        "untried",
    ]
    assert gpu_proof.main(words) == 1
    found = results(tmp_path)
    assert found["first"]["facts"] == {"device": "cuda", "dtype": "bfloat16", "number": 1}
    assert found["first"]["machine"] == "1 x H100" and not found["first"]["rehearsed"]
    assert found["two GPUs"]["why"] == "needs 2 GPUs"
    assert "1 failed or were refuted: raises" in capfd.readouterr().out
    page = (tmp_path / "gpu.md").read_text()
    assert "## 1 x H100" in page and "| first |  | **measured** | 0 |" in page
    assert "- untried: stays refused" in page
    assert gpu_proof.main(words) == 0 and "raises: is known already" in capfd.readouterr().out


def test_a_rehearsal_calls_the_function_of_the_proof_with_the_same_keys():
    names = [row.name for row in proof_rows.ROWS]
    assert len(set(names)) == len(names)
    for row in proof_rows.ROWS:
        assert row.sizes.keys() == row.tiny.keys(), row.name
        module, _, function = row.work.partition(":")
        text = (BENCH / f"{module}.py").read_text()
        wanted = f"def {function}(device: str, dtype: str, sizes: Facts) -> Facts:"
        assert wanted in text, row.name


def test_every_finding_has_a_row_and_every_row_names_findings_that_are_told():
    named = {finding for row in proof_rows.ROWS for finding in row.findings}
    assert named == set(proof_rows.FINDINGS)


def test_rows_without_vllm_come_first_and_several_gpus_last():
    kinds = [(row.gpus > 1, bool(row.vllm)) for row in proof_rows.ROWS]
    alone = [kind for kind in kinds if not kind[0]]
    assert alone == sorted(alone) and kinds == sorted(kinds, key=lambda kind: kind[0])


def test_every_refusal_until_proven_has_a_row():
    source = inspect.getsource(arguments._untested_problems)
    rows = [row for row in proof_rows.ROWS if row.refusal]
    assert source.count("yield Problem") == len(rows)
    assert all(row.refusal in source for row in rows)
    said = re.sub(r"\s+", " ", (ROOT / "docs" / "gpu.md").read_text())
    assert all(f"- {row.name}: " in said for row in rows)


def test_the_quick_rows_are_rehearsed(tmp_path):
    began = time.monotonic()
    ended = run(tmp_path, "--rehearse", "--quick", "--together", listing="proof_rows", limit=300)
    print(f"{time.monotonic() - began:.1f} s")
    found = results(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wanted = {row.name for row in proof_rows.ROWS if row.quick}
    assert set(found) == wanted
    for name, row in found.items():
        skipped = row.get("why", "").startswith("needs peft")
        assert skipped or (row["status"] == "done" and row["verdict"] != "refuted"), name


SLOW = [row for row in proof_rows.ROWS if not row.quick]


def marks(row) -> list:
    found = [pytest.mark.slow]
    found += [pytest.mark.vllm] if row.vllm else []
    return found + ([pytest.mark.trl] if "trl" in row.packages else [])


@pytest.mark.parametrize("row", [pytest.param(r, marks=marks(r), id=r.name) for r in SLOW])
def test_the_other_rows_are_rehearsed_too(tmp_path, row):
    ended = run(tmp_path, "--rehearse", "--rows", row.name, listing="proof_rows", limit=700)
    found = results(tmp_path)[row.name]
    if found["status"] == "cannot":
        pytest.skip(found["why"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found["status"] == "done" and found["verdict"] != "refuted"


@pytest.mark.slow
@pytest.mark.trl
def test_the_settings_of_trls_sampler_are_keys_that_it_has():
    trl = pytest.importorskip("trl")
    side = importlib.import_module("side_trl")
    known = {field.name for field in dataclasses.fields(trl.RLOOConfig)}
    with_vllm = side.sampler(53, 553, 0.3)
    assert {*with_vllm, *side.sampler(53, 553, None)} <= known
    assert with_vllm["use_vllm"] and with_vllm["vllm_mode"] == "colocate"
    assert with_vllm["vllm_gpu_memory_utilization"] == 0.3


def test_the_page_is_made_from_the_results():
    ended = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_the_page_has_every_row_its_losses_and_what_was_not_run():
    place = gpu_proof.Place("1 x H100", 1, {"torch": "2.13"}, "abc", False)
    first, second, third, *_ = proof_rows.ROWS
    base = {"date": "2026-01-02T03:04:05", "seconds": 3.0}
    facts = {"ratio": 0.8, "table": [{"tool": "trl", "ratio": 0.8}, {"tool": "rloo", "MFU": 0.4}]}
    done = place.key(first) | base | {"status": "done", "verdict": "measured", "facts": facts}
    hung = place.key(second) | base | {"status": "hung", "why": "had not ended | after 3 s"}
    rehearsed = place.key(third) | done | {"row": third.name, "rehearsed": True}
    text = proof_page.page(proof_rows.ROWS, [done, hung, rehearsed])
    assert "## 1 x H100\n\ntorch 2.13; commit abc; 2026-01-02 to 2026-01-02." in text
    lines = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert all(row.name in lines for row in proof_rows.ROWS)
    assert "**measured**" in lines[first.name] and "ratio 0.8 **`rloo` loses**" in lines[first.name]
    assert "**hung**" in lines[second.name] and "ended / after" in lines[second.name]
    assert "not yet run" in lines[third.name]
    assert "| trl | 0.8 **`rloo` loses** |" in text


def test_what_fails_and_is_refused_until_it_works_is_no_failure_on_a_gpu():
    failed = {"status": "failed", "verdict": "stays refused", "rehearsed": False}
    assert not gpu_proof.is_bad(failed)
    assert gpu_proof.is_bad(failed | {"rehearsed": True})
    assert gpu_proof.is_bad({"status": "failed", "rehearsed": False})
    assert gpu_proof.is_bad({"status": "done", "verdict": "refuted", "rehearsed": False})


def test_an_error_that_wraps_a_full_gpu_is_out_of_memory():
    try:
        try:
            raise RuntimeError("CUDA out of memory. Tried")
        except RuntimeError as error:
            raise ValueError("other words") from error
    except ValueError as error:
        assert proof_child.is_out_of_memory(error)
    assert not proof_child.is_out_of_memory(ValueError("memory"))
