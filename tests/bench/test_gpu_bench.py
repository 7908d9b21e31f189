"""bench/gpu.py, tried on the CPU with tiny shapes: what it says, and where it says nothing."""

import contextlib
import functools
import inspect
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DEFAULT = ["trl_gc", "trl_nogc", "packed", "shared_gc", "shared"]
EVERY = [*DEFAULT, "packed_varlen", "shared_again"]


@pytest.fixture(scope="module")
def once():
    """The program as it is without a GPU, and what one tiny run of it said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        import gpu

        seen, said = tables(gpu, patch), io.StringIO()
        words = ["--tiny", "--truth", "--rounds", "2", "--workloads", "W5", "W7"]
        with contextlib.redirect_stdout(said):
            code = gpu.main([*words, "--variants", *EVERY])
        yield gpu, code, dict(seen), said.getvalue()


def tables(gpu, patch):
    """From now on the rows that are shown, by workload and variant; keeping one is an error."""
    seen, show = {}, inspect.unwrap(gpu.gpu_rows.show)

    @functools.wraps(show)
    def keep(shape, found):
        seen[shape.name] = {row["variant"]: row for row in found}
        show(shape, found)

    patch.setattr(gpu.gpu_rows, "show", keep)
    patch.setattr(gpu.results, "append", lambda rows: pytest.fail("tiny rows were kept"))
    return seen


@pytest.fixture
def bench(once):
    """The program."""
    return once[0]


@pytest.fixture
def rows(once):
    """What the tiny run found, by workload and variant."""
    return once[2].copy()


def test_every_variant_of_a_tiny_run_has_the_gradient_of_trls_order_of_work(once):
    _, code, rows, out = once
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert code == 0
    assert [line["workload"] for line in said] == list(rows) == ["W5", "W7"]
    for line in said:
        found = rows[line["workload"]]
        assert list(found) == EVERY
        assert all(row["gradient_rel_diff"] < 2e-5 for n, row in found.items() if n != "trl_nogc")
        assert all(row["gradient_rel_fp32"] < 2e-5 for row in found.values())
        assert all(row["logp_diff_most"] < 5e-4 for row in found.values())
        assert all(len(row["s_trains"]) == 2 and row["micro_groups"] == 8 for row in found.values())
        ours = min(found["shared"]["s_train"], found["shared_gc"]["s_train"])
        assert line["ratio_gc"] == round(found["trl_gc"]["s_train"] / ours, 3)
        assert line["ratio_nogc"] == round(found["trl_nogc"]["s_train"] / ours, 3)
        assert line["memory_ratio_gc"] is None and line["gradient_rel_diff"] < 2e-5


def test_layouts_settle_as_their_variants_say(rows):
    levels = {name: row["level"] for name, row in rows["W5"].items()}
    assert levels["packed"] == "packed, head fused"
    assert levels["shared"] == levels["shared_gc"] == "shared, head fused"
    assert [levels["trl_gc"], rows["W5"]["shared"]["attention"]] == ["padded", "rloo_shared"]


def test_rows_that_are_not_computed_are_not_counted(rows):
    computed = {name: row["tokens"]["computed"] for name, row in rows["W5"].items()}
    assert computed["trl_gc"] == computed["trl_nogc"] > computed["packed"] > computed["shared"]
    assert computed["shared"] == computed["shared_gc"] == computed["shared_again"]
    assert computed["packed"] == computed["packed_varlen"]
    for name, row in rows["W5"].items():
        apart = row["mfu_with_recompute"] - row["mfu"]
        kept = ("packed", "shared", "packed_varlen")  # logits
        assert (apart > 0) == (name not in kept)


def test_the_work_of_a_batch_is_what_can_be_counted_by_hand(bench):
    rows_ = bench.gpu_rows
    cost = rows_.Cost(10, 1, 2, 3, 5)
    group = bench.gpu_parts.case(replace(bench.SHAPES["W5"], prompt=(4, 4), completion=(3, 3), k=2,
                                         prompts=1), 0)  # fmt: skip
    head = 2.0 * 3 * 5 * 6
    of = {name: rows_.work(cost, group, bench.VARIANTS[name]) for name in DEFAULT}
    assert of["trl_gc"] == (20.0 * 14 + 8 * 49, head, 14)
    assert of["packed"] == (20.0 * 12 + 8 * 36, head, 12)
    assert of["shared"] == (20.0 * 8 + 8 * (8 + 2 * (8 + 2)), head, 8)
    body = of["trl_gc"][0]
    assert rows_.done(cost, group, bench.VARIANTS["trl_gc"], 1)[:2] == (
        5 * (body + head),
        body + head,
    )


def test_without_a_match_of_gradients_there_is_no_ratio(bench, monkeypatch, capsys):
    reference = bench.gpu_parts.advantages
    monkeypatch.setattr(
        bench.gpu_parts.Rloo, "run",
        lambda self, size, run=bench.gpu_parts.Rloo.run: wrong(self, size, run, bench, reference),
    )  # fmt: skip
    words = ["--variants", "trl_gc", "trl_nogc", "shared"]
    assert bench.main(["--tiny", "--rounds", "1", "--workloads", "W5", *words]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["ratio_gc"] is None and said["ratio_nogc"] is None
    assert said["gradient_rel_diff"] > 1e-3


def wrong(phase, size, run, bench, advantages):
    """A phase that forgets the KL."""
    bench.gpu_parts.advantages = lambda score, kl: advantages(score, kl * 0)
    try:
        return run(phase, size)
    finally:
        bench.gpu_parts.advantages = advantages


def test_what_does_not_fit_is_tried_by_halves_and_left_out_below_one(bench, monkeypatch):
    rows = tables(bench, monkeypatch)
    run = bench.gpu_parts.Trl.run

    def short(self, size):
        if size > (0 if self.variant.gc else 2):
            raise torch.OutOfMemoryError
        return run(self, size)

    monkeypatch.setattr(bench.gpu_parts.Trl, "run", short)
    code = bench.main(
        [
            "--tiny",
            "--rounds",
            "1",
            "--workloads",
            "W5",
            "--variants",
            "trl_gc",
            "trl_nogc",
            "shared",
        ]
    )
    assert code == 0
    assert list(rows["W5"]) == ["trl_nogc", "shared"]
    assert rows["W5"]["trl_nogc"]["micro_groups"] == 2
    assert rows["W5"]["shared"]["gradient_rel_diff"] < 2e-5


def test_what_is_run_by_default_fits_80_gb_in_float32_with_reference_and_gradients(bench):
    from transformers import AutoModelForCausalLM

    def size(name):
        shape = bench.SHAPES[name]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(bench.gpu_parts.config(shape))
        copies = 1 if shape.lora else 3  # weights; and reference and gradients
        return 4 * copies * sum(w.numel() for w in model.parameters())

    names = bench.parse([]).workloads
    assert names == ["W5", "W7", "W6-8L", "W6-lora"]
    assert all(size(name) < 40e9 for name in names) and size("W6") > 80e9


def test_without_trl_its_head_is_computed_in_chunks_with_the_same_numbers(bench, monkeypatch):
    rows = tables(bench, monkeypatch)
    monkeypatch.setattr(bench.gpu_parts, "add_fused_lm_head", None)
    monkeypatch.setattr(bench.gpu_parts, "CHUNK", 7)
    words = ["--tiny", "--rounds", "1", "--workloads", "W7", "--variants", "trl_nogc", "shared"]
    assert bench.main(words) == 0
    assert max(r["gradient_rel_diff"] or 0 for r in rows["W7"].values()) < 2e-5


def test_without_a_gpu_it_says_in_one_line_that_it_needs_one(bench, capsys):
    assert bench.main([]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("bench/gpu.py needs a CUDA GPU") and err.count("\n") == 1


def test_a_whole_step_without_vllm_is_left_out_and_said_so(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.gpu_step.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["--tiny", "--workloads", "W8", "W10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{n}: vLLM cannot be imported here, left out" for n in ("W8", "W10")]


def test_the_page_shows_what_a_gpu_took_and_marks_what_loses(once, rows):
    import speed_page

    run = [rows["W5"][name] | {"device": "H200", "peak_mb": 2048.0} for name in DEFAULT]
    shared = next(row for row in run if row["variant"] == "shared")
    shared |= {"s_train": 0.010, "s_train_least": 0.009, "s_train_most": 0.012}
    next(row for row in run if row["variant"] == "trl_gc")["s_train"] = 0.025
    next(row for row in run if row["variant"] == "trl_nogc")["s_train"] = 0.005
    text = speed_page.page(run).split("## W5")[1].split("\n## ")[0]
    lines = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert list(lines) == DEFAULT and "Not yet run" not in text and "H200" in text
    assert "10 (9 - 12)" in lines["shared"] and "2.0 |" in lines["shared"]
    assert "2.50x |" in lines["trl_gc"] and "0.50x **`rloo` loses**" in lines["trl_nogc"]
