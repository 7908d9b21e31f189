"""`rloo sft` and `rloo reward-model`: what they learn, what they leave, and what they refuse."""

import json
import math
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from cli_cases import Rloo, strict
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rloo_cli.checkpoint import resume
from rloo_cli.cli import main, supervised
from rloo_cli.config import check, synthetic
from rloo_cli.config.compose import compose_config
from rloo_cli.config.supervised import split_batch, supervised_training
from rloo_cli.data.order import like_length_batches
from rloo_cli.data.synthetic import tiny
from rloo_cli.distributed.world import World
from rloo_cli.launch import preflight
from rloo_cli.policy import reward_load
from rloo_cli.rewards.engine.build import build_reward
from rloo_cli.rewards.engine.ready import RewardSetup
from rloo_cli.train.supervised import rows, trainers, worker
from rloo_cli.utils.errors import ConfigError, DataError, MachineError, NumbersError, RunError
from rloo_cli.utils.files import read_json

SFT = ["+recipe=smoke", "sft.completion_column=answer", "sft.learning_rate=1e-2"]
SFT += ["sft.data.eval_split=test", "sft.batch_size=8", "sft.warmup_steps=2", "sft.log_every=2"]
PAIRS = ["+recipe=smoke", "reward_model.data.path=make:tiny_pairs", "reward_model.batch_size=8"]
PAIRS += ["reward_model.data.eval_split=test", "reward_model.learning_rate=1e-2"]
COMPLETIONS = ("chosen", "rejected")
KEPT_ENDINGS = {".json", ".jsonl", ".yaml", ".safetensors", ".jinja"}


@pytest.fixture(autouse=True)
def root(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty folder to work in, and the session's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    return tmp_path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verbs' process is this one."""

    def run(module: str, words: list[str], *watched: object) -> int:
        assert module == "train.supervised.worker"
        worker.run_supervised_training(Path(words[0]), words[1])
        return 0

    monkeypatch.setattr(supervised.processes, "run_processes", run)


def left(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


def settings(*words: str) -> Any:
    return check.check_config(compose_config(["+recipe=smoke", *words]))


def last_scores(model: Any, sequences: list[list[int]]) -> list[float]:
    """A reward model's score of each sequence, alone, at its last token."""
    with torch.no_grad():
        hidden = [model.base_model(torch.tensor([ids]))[0][0, -1] for ids in sequences]
        return [float(model.score(state)) for state in hidden]


def read(section: str, run: Any, data: Any, tokens: Any, limit: int = 99) -> rows.TrainingRows:
    """The examples of a section, as ids."""
    source = supervised_training(run, section).data
    return rows.RowReader(section, source, tokens, run, limit).read_rows(data)


def learned_ids(row: dict[str, list[int]]) -> list[int]:
    """The ids of an example that the loss counts."""
    return [label for label in row["labels"] if label != rows.NOT_LEARNED]


def training_of(
    section: str, model: Any, examples: list[dict[str, Any]], *words: str, tokens: Any = None
) -> list[dict[str, Any]]:
    """The lines of metrics of a training on these ids, one a step."""
    data = [e | {"length": max(len(ids) for ids in e.values())} for e in examples]
    prepared = [rows.TrainingRows(datasets.Dataset.from_list(data), 0, 0)]
    run = settings(*(f"{section}.{word}" for word in ("log_every=1", "warmup_steps=0", *words)))
    world, found = World(0, 1, torch.device("cpu")), []
    given = (model, tokens or tiny.tiny_tokenizer(), run, world, prepared)
    trainer, _ = trainers.build_trainer(section, *given, Path("training"), found.append)
    trainer.train()
    return found


# What the verbs leave.


def test_sft_leaves_a_model_that_loads_and_whose_loss_fell(rloo: Rloo, root: Path) -> None:
    ended = rloo("sft", *SFT)
    assert ended.code == 0 and ended.err == "", ended.said
    folder = rloo.folder / "runs" / "sft" / "smoke"
    rows = strict(folder / "training" / "metrics.jsonl")
    measured = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert len(measured) == 2 and measured[1] < measured[0] - 1
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8]
    assert "step 8/8" in ended.out and "model.path=runs/sft/smoke" in ended.out
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)
    first = AutoModelForCausalLM.from_pretrained(synthetic.resolve_model_path("make:tiny"))
    assert model.config.to_dict().keys() == first.config.to_dict().keys()
    assert not torch.equal(model.lm_head.weight, first.lm_head.weight)
    assert tokens.chat_template == tiny.TEMPLATE
    assert {p.name for p in (rloo.folder / "runs").iterdir()} == {"sft"}


def test_a_reward_model_has_one_label_and_prefers_what_was_chosen(here: None, root: Path) -> None:
    assert main.find_verb(["reward-model", *PAIRS])() == 0
    folder = root / "runs" / "reward_model" / "smoke"
    summary = read_json(folder / "training" / "summary.json")
    assert summary["after"]["eval_accuracy"] > 0.9 > summary["before"]["eval_accuracy"]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1 and model.score.bias is None
    assert model.config.pad_token_id == tokens.pad_token_id == 0
    entry = settings("reward=model", f"reward.model.path={folder}").rewards["model"]
    row = tiny.tiny_pair_examples("test")[0]
    pair = [rows.tokenize_with_eos(row["prompt"] + row[n], tokens, True) for n in COMPLETIONS]
    ours = last_scores(model.eval(), pair)
    reads = build_reward("model", entry).code
    reads.prepare_model(
        RewardSetup(tokens, [], 100, torch.device("cpu"), lambda note: None, reward_load)
    )
    texts = [row["chosen"], row["rejected"]]
    ids = [[*tokens(text)["input_ids"], tokens.eos_token_id] for text in texts]
    prompt = tokens(row["prompt"])["input_ids"]
    theirs = reads([row["prompt"]] * 2, texts, [prompt] * 2, ids, ["stop"] * 2, [0, 0])
    assert ours == pytest.approx(theirs, abs=1e-5)  # trained on what is read later


def test_the_same_training_is_not_done_again_and_another_never_takes_its_place(
    here: None, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.find_verb(["sft", *SFT, "sft.data.max_samples=16"])() == 0
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}
    assert main.find_verb(["sft", *SFT, "sft.data.max_samples=16", "max_steps=9"])() == 0
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="another sft"):
        main.find_verb(["sft", *SFT, "sft.data.max_samples=8"])()
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("word", ["lora=default", "lora=dora"])
def test_an_adapter_is_merged_into_the_model_that_sft_leaves(
    here: None, root: Path, word: str
) -> None:
    assert main.find_verb(["sft", *SFT, word])() == 0
    folder = root / "runs" / "sft" / "smoke"
    first, model = a_model(), AutoModelForCausalLM.from_pretrained(folder)
    assert first.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(model.model.embed_tokens.weight, first.model.embed_tokens.weight)
    for old, new in zip(first.model.layers, model.model.layers, strict=True):
        assert not torch.equal(old.self_attn.q_proj.weight, new.self_attn.q_proj.weight)
    assert (folder / "adapter" / "adapter_config.json").is_file()
    lines = strict(folder / "training" / "metrics.jsonl")
    measured = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert measured[1] < measured[0]


def test_an_adapter_of_a_reward_model_is_trained_with_its_head(here: None, root: Path) -> None:
    assert main.find_verb(["reward-model", *PAIRS, "lora=default"])() == 0
    folder = root / "runs" / "reward_model" / "smoke"
    summary = read_json(folder / "training" / "summary.json")
    assert summary["after"]["eval_accuracy"] > 0.9
    entry = settings("reward=model", f"reward.model.path={folder}").rewards["model"]
    code = build_reward("model", entry).code
    code.prepare_model(
        RewardSetup(
            tiny.tiny_tokenizer(), [], 100, torch.device("cpu"), lambda note: None, reward_load
        )
    )
    row = tiny.tiny_pair_examples("test")[0]
    tokens = tiny.tiny_tokenizer()
    ids = [[*tokens(row[name])["input_ids"], 1] for name in COMPLETIONS]
    prompt = tokens(row["prompt"])["input_ids"]
    texts = [row[name] for name in COMPLETIONS]
    better, worse = code([row["prompt"]] * 2, texts, [prompt] * 2, ids, ["stop"] * 2, [0, 0])
    assert better > worse


def test_an_adapter_of_the_output_embedding_is_refused(here: None, root: Path) -> None:
    words = ("lora=default", "model.lora.target_modules=[lm_head,q_proj]")
    with pytest.raises(ConfigError) as refused:
        main.find_verb(["sft", *SFT, *words])()
    assert refused.value.problems[0].where == "model.lora.target_modules"


@pytest.mark.parametrize("words", [SFT, PAIRS], ids=["sft", "reward_model"])
def test_what_is_left_holds_no_pickle(here: None, root: Path, words: list[str]) -> None:
    verb = "sft" if words is SFT else "reward-model"
    assert main.find_verb([verb, *words, "model.dtype=bfloat16"])() == 0
    files = [path for path in root.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= KEPT_ENDINGS and len(files) > 6
    kind = AutoModelForCausalLM if words is SFT else AutoModelForSequenceClassification
    model = kind.from_pretrained(next(root.rglob("model.safetensors")).parent)
    assert model.dtype is torch.bfloat16


def test_without_trl_the_verbs_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    have = preflight.find_spec
    monkeypatch.setattr(preflight, "find_spec", lambda n: None if n == "trl" else have(n))
    for section in ("sft", "reward_model"):
        with pytest.raises(MachineError) as refused:
            preflight.check_supervised_machine(settings(), section)
        assert refused.value.code == 3
        assert refused.value.problems[0].fix == "pip install 'rloo-cli[stages]'"


@pytest.mark.parametrize("verb", ["sft", "reward-model"])
def test_a_training_that_user_code_ends_with_0_is_not_finished(rloo: Rloo, verb: str) -> None:
    (rloo.folder / "mine.py").write_text("import os\ndef end(row):\n    os._exit(0)\n")
    path = "make:tiny" if verb == "sft" else "make:tiny_pairs"
    ended = rloo(verb, "+recipe=smoke", f"data.path={path}", "data.map=mine.py:end")
    assert ended.code == 6 and "os._exit" in ended.err, ended.said
    assert rloo.left() == ["mine.py"]


@pytest.mark.slow
def test_a_training_that_is_stopped_leaves_nothing(rloo: Rloo) -> None:
    running = rloo.start("reward-model", *PAIRS, "reward_model.epochs=1e5")
    said = rloo.folder / "out"
    try:
        while "step 0 " not in said.read_text() and running.poll() is None:
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 75, said.read_text()
    finally:
        running.kill()
    assert rloo.left() == ["out"]


def test_a_training_that_fails_leaves_nothing(
    here: None, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", full)
    with pytest.raises(RunError, match="cannot be written"):
        main.find_verb(["sft", *SFT, "sft.data.max_samples=8", "sft.data.eval_split=null",
                        "sft.eval_rows=2"])()  # fmt: skip
    assert left(root) == []


# What they refuse.

BAD = {
    "sft sft.epoch=2": (2, "sft.epoch is not a key"),
    "sft sft.batch_size=0": (2, "sft.batch_size"),
    "sft sft.micro_batch_size=64 sft.batch_size=8": (2, "more than a step has"),
    "sft sft.path=make:nothing": (2, "unknown model"),
    "sft sft.path=./nothing": (2, "does not exist"),
    "sft sft.revision=v1": (2, "without sft.path"),
    "reward-model reward_model.data.path=./nothing.jsonl": (2, "does not exist"),
    "sft --dry-run": (2, "--dry-run is not a flag of rloo sft"),
    "sft sft.path=org/nothing": (3, "HF_HUB_OFFLINE"),
}


@pytest.mark.slow_but("sft sft.batch_size=0", "sft sft.path=./nothing")
@pytest.mark.parametrize("words", BAD)
def test_what_a_config_shows_is_refused_before_torch(words: str, rloo_without_torch: Rloo) -> None:
    verb, *rest = words.split()
    code, said = BAD[words]
    ended = rloo_without_torch(verb, "+recipe=smoke", *rest)
    assert ended.code == code and said in ended.err, ended.said
    assert rloo_without_torch.left() == []


DATA = {
    "sft sft.eval_rows=0": ({}, "sft.completion_column", "no column 'completion'"),
    "sft sft.completion_column=anser sft.data.eval_split=test": (
        {},
        "sft.completion_column=answer",
        "no column",
    ),
    "sft sft.data.prompt_column=question": ({}, "sft.data.prompt_column", "no column 'question'"),
    "sft sft.data.split=tset": ({}, "sft.data.split", "no split 'tset'"),
    "reward-model reward_model.eval_rows=9": (
        {},
        "reward_model.chosen_column",
        "no column 'chosen'",
    ),
    "sft sft.eval_rows=64 sft.completion_column=answer": (
        {},
        "sft.eval_rows=0, or sft.data.eval_split",
        "no rows are left",
    ),
    "sft sft.eval_rows=2": ({"completion": [None] * 64}, "row 0", "is not a string"),
    "sft sft.eval_rows=1": ({"completion": ["", " "] * 32}, "63 are empty", "only 0 of 63"),
    "sft sft.max_length=40 sft.eval_rows=2": (
        {"completion": ["x" * 40] * 64},
        "sft.max_length=N",
        "only 0 of",
    ),
}


@pytest.mark.parametrize("words", DATA)
def test_data_that_does_not_fit_is_refused_before_weights_load(
    words: str, here: None, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, *rest = words.split()
    columns, where, what = DATA[words]
    if columns:
        rows = [
            r | {n: v[i] for n, v in columns.items()}
            for i, r in enumerate(tiny.tiny_examples("train"))
        ]
        (root / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rest += ["data.path=mine.jsonl"]
    monkeypatch.setattr(worker.load, "load_causal_lm", None)
    monkeypatch.setattr(worker.load, "load_sequence_classifier", None)
    with pytest.raises(DataError) as refused:
        main.find_verb([verb, "+recipe=smoke", *rest])()
    assert what in str(refused.value) and where in str(refused.value)
    assert left(root) == (["mine.jsonl"] if columns else [])


def test_a_small_data_set_is_trained_on_and_a_tenth_of_it_is_held_out() -> None:
    def counts(section: str, n: int, *given: str) -> list[int]:
        words = " ".join(given).split()
        run = check.check_config(
            compose_config([*SFT, "data.path=make:addition", f"data.max_samples={n}", *words])
        )
        source = supervised_training(run, section).data
        return [len(rows) for rows in worker._load_examples(source, getattr(run, section), section)]

    for section in ("sft", "reward_model"):
        own = f"data.eval_split=null {section}.data.eval_split=null"
        assert counts(section, 250, own) == [225, 25]
        assert counts(section, 5000, own) == [4800, 200]
        assert counts(section, 9, own) == [9]
        assert counts(section, 250, own, f"{section}.eval_rows=200") == [50, 200]
        assert counts(section, 250, own, f"{section}.eval_rows=0") == [250]
    assert counts("sft", 300, "data.eval_split=test") == [300, 200]


def test_rows_that_are_empty_or_too_long_are_left_out_and_counted(root: Path, sentence) -> None:
    texts = ["fine"] * 6 + ["", "x" * 90, "y" * 60]
    rows = [{"prompt": "ab", "completion": text} for text in texts]
    rows.append({"prompt": "p" * 64, "completion": "ok"})
    (root / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = settings("data.path=mine.jsonl")
    data = worker.dataset.load_split(supervised_training(run, "sft").data, "train")
    kept = read("sft", run, data, tiny.tiny_tokenizer(), 63)
    assert (len(kept.dataset), kept.num_too_long, kept.num_empty, max(kept.lengths)) == (
        7,
        2,
        1,
        63,
    )
    sentence(kept.describe(63))


def test_a_loss_that_is_no_number_ends_the_training(root: Path) -> None:
    model = a_model()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(NumbersError, match="not finite"):
        training_of("sft", model, ROWS)


# The losses.


def a_model(kind: Any = AutoModelForCausalLM, path: str = "make:tiny") -> Any:
    return kind.from_pretrained(synthetic.resolve_model_path(path))


def example(ids: list[int], start: int) -> dict[str, list[int]]:
    """An example whose completion begins at `start`."""
    return {"input_ids": ids, "labels": [rows.NOT_LEARNED] * start + ids[start:]}


ROWS = [
    example([5, 6, 7, 8, 1], 2),
    example([9, 1, 9, 1], 3),
    example([4, 3, 2, 7, 6, 1], 1),
    example([8, 8, 1], 1),
]
ID_PAIRS = [
    {"chosen_ids": [5, 6, 7, 8, 1], "rejected_ids": [9, 1, 9, 1]},
    {"chosen_ids": [4, 1], "rejected_ids": [3, 2, 1, 7, 6, 1]},
]


def test_the_loss_of_sft_is_transformers_with_the_prompt_masked(root: Path) -> None:
    model, total, count = a_model(), 0.0, 0
    for row in ROWS:
        ids, labels = (torch.tensor([row[n]]) for n in ("input_ids", "labels"))
        learned = len(learned_ids(row))
        total += learned * float(model(input_ids=ids, labels=labels).loss.detach())
        count += learned
    (line,) = training_of("sft", model, ROWS, "batch_size=4", "learning_rate=0")
    assert line["loss"] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize("padding", ["<pad>", "<eos>"])
def test_a_reward_model_reads_the_last_token_whatever_the_padding_is(
    root: Path, padding: str
) -> None:
    model = a_model(AutoModelForSequenceClassification, "make:tiny_reward")
    tokens = tiny.tiny_tokenizer()
    tokens.pad_token = padding
    chosen, rejected = (
        last_scores(model.eval(), [pair[f"{name}_ids"] for pair in ID_PAIRS])
        for name in COMPLETIONS
    )
    gaps = [one - other for one, other in zip(chosen, rejected, strict=True)]
    losses = [math.log(1 + math.exp(-gap)) for gap in gaps]
    center = [0.5 * (one + other) ** 2 for one, other in zip(chosen, rejected, strict=True)]
    words = ("batch_size=2", "learning_rate=0", "center_rewards_coefficient=0.5")
    (line,) = training_of("reward_model", model, ID_PAIRS, *words, tokens=tokens)
    assert line["margin"] == pytest.approx(sum(gaps) / 2, abs=1e-5)
    assert line["loss"] == pytest.approx((sum(losses) + sum(center)) / 2, abs=1e-5)


@pytest.mark.parametrize("micro", [1, 3])
def test_parts_of_a_batch_make_the_same_step(root: Path, micro: int) -> None:
    words = ("batch_size=4", "learning_rate=1e-2")
    parts, whole = a_model(), a_model()
    training_of("sft", parts, ROWS, *words, f"micro_batch_size={micro}")
    (line,) = training_of("sft", whole, ROWS, *words)
    assert line["rows"] == 4 and line["steps"] == 1
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_a_batch_is_split_into_equal_parts() -> None:
    def parts(micro: int | None, ranks: int) -> tuple[int, int]:
        keys = {"batch_size": 12, "micro_batch_size": micro}
        return split_batch(settings().sft.model_copy(update=keys), ranks)

    assert parts(None, 1) == (12, 1) and parts(None, 2) == (6, 1)
    assert parts(5, 1) == (4, 3) and parts(5, 2) == (3, 2) and parts(1, 3) == (1, 4)


def test_every_pass_has_every_row_once_in_a_seeded_order() -> None:
    lengths = [7 * i % 23 for i in range(50)]
    draw = like_length_batches(lengths, 4, 1)
    passes = [[next(draw) for _ in range(13)] for _ in range(2)]
    for batches in passes:
        assert sorted(i for batch in batches for i in batch) == list(range(50))
    assert passes[0] != passes[1]
    again = like_length_batches(lengths, 4, 1)
    assert [next(again) for _ in range(13)] == passes[0]
    other = like_length_batches(lengths, 4, 2)
    assert [next(other) for _ in range(13)] != passes[0]
    spread = [max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in passes[0]]
    assert sum(spread) / len(spread) < 5  # like lengths stand together
    order = trainers.SeededOrder(lengths, 4, 1, 70)
    assert [*order] == [i for batch in (*passes[0], *passes[1]) for i in batch][:70]
    assert len(order) == 70


def test_the_rate_warms_up_and_falls_to_nothing(root: Path) -> None:
    words = ("batch_size=1", "warmup_steps=2", "learning_rate=1e-3", "epochs=1.5")
    found = training_of("sft", a_model(), ROWS, *words)
    rates = [line["learning_rate"] for line in found]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert [line["epoch"] for line in found] == [0.25, 0.5, 0.75, 1, 1.25, 1.5]


# Texts.


def test_every_completion_has_one_end() -> None:
    tokens = tiny.tiny_tokenizer()
    for text in ("ab", "ab<eos>", "ab<eos>\n"):
        ids = rows.tokenize_with_eos(text, tokens, False)
        assert ids == [*tokens("ab")["input_ids"], 1]
    tokens.eos_token = None
    with pytest.raises(DataError, match="no end-of-text"):
        rows.tokenize_with_eos("ab", tokens, False)


def test_conversations_are_read_through_the_chat_template(root: Path) -> None:
    asked = [{"role": "user", "content": "Hi"}]
    said = [{"role": "assistant", "content": "Yes"}]
    row = {"prompt": asked, "completion": said, "chosen": "Yes", "rejected": said}
    (root / "mine.jsonl").write_text(json.dumps(row) + "\n")
    run, tokens = settings("data.path=mine.jsonl"), tiny.tiny_tokenizer()
    data = worker.dataset.load_split(supervised_training(run, "sft").data, "train")
    (row,) = read("sft", run, data, tokens).dataset
    assert tokens.decode(row["input_ids"]) == "<|user|>Hi\n<|assistant|>Yes\n<eos>"
    assert tokens.decode(learned_ids(row)) == "Yes\n<eos>"
    (pair,) = read("reward_model", run, data, tokens).dataset
    assert tokens.decode(pair["chosen_ids"]) == "<|user|>Hi\n<|assistant|>Yes\n"
    assert pair["chosen_ids"] == pair["rejected_ids"]


HI, YES = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize(
    ("row", "words", "decoded"),
    [
        ({"messages": [HI, YES]}, (), "<|user|>Hi\n<|assistant|>Yes\n<eos>"),
        (
            {"messages": [HI, YES]},
            ("data.system=Be kind.",),
            "<|system|>Be kind.\n<|user|>Hi\n<|assistant|>Yes\n<eos>",
        ),
        ({"text": "Hi there."}, (), "Hi there.<eos>"),
    ],
)
def test_texts_and_conversations_without_a_prompt_are_trained_on_whole(
    root: Path, row: dict[str, object], words: tuple[str, ...], decoded: str
) -> None:
    (root / "mine.jsonl").write_text((json.dumps(row) + "\n") * 3)
    run, tokens = (
        settings("data.path=mine.jsonl", "data.eval_split=null", *words),
        tiny.tiny_tokenizer(),
    )
    source = supervised_training(run, "sft").data
    (data,) = worker._load_examples(source, run.sft, "sft")
    first, *others = read("sft", run, data, tokens).dataset
    assert len(others) == 2 and tokens.decode(first["input_ids"]) == decoded
    assert first["labels"] == first["input_ids"]


def test_pairs_of_whole_conversations_need_no_prompt(root: Path) -> None:
    no = {"role": "assistant", "content": "No"}
    (root / "mine.jsonl").write_text(json.dumps({"chosen": [HI, YES], "rejected": [HI, no]}))
    run, tokens = settings("data.path=mine.jsonl", "data.eval_split=null"), tiny.tiny_tokenizer()
    source = supervised_training(run, "reward_model").data
    (data,) = worker._load_examples(source, run.reward_model, "reward_model")
    (pair,) = read("reward_model", run, data, tokens).dataset
    assert tokens.decode(pair["chosen_ids"]) == "<|user|>Hi\n<|assistant|>Yes\n"
    assert tokens.decode(pair["rejected_ids"]) == "<|user|>Hi\n<|assistant|>No\n"


@pytest.mark.parametrize("words", ["data.template='Q {prompt}'", "data.chat=true", "data.system=x"])
def test_keys_for_prompts_are_refused_where_texts_have_none(root: Path, words: str) -> None:
    (root / "mine.jsonl").write_text(json.dumps({"text": "Hi there."}) + "\n")
    run = settings("data.path=mine.jsonl", "data.eval_split=null", words)
    source = supervised_training(run, "sft").data
    (data,) = worker._load_examples(source, run.sft, "sft")
    with pytest.raises(DataError) as refused:
        read("sft", run, data, tiny.tiny_tokenizer())
    assert refused.value.problems[0].where == words.partition("=")[0]


def test_data_of_no_known_format_is_refused_with_its_columns(root: Path) -> None:
    (root / "mine.jsonl").write_text(json.dumps({"question": "Hi there."}) + "\n")
    run = settings("data.path=mine.jsonl", "data.eval_split=null")
    source = supervised_training(run, "sft").data
    (data,) = worker._load_examples(source, run.sft, "sft")
    with pytest.raises(DataError) as refused:
        read("sft", run, data, tiny.tiny_tokenizer())
    assert refused.value.problems[0].where.startswith("data.prompt_column")


def test_a_template_that_rewrites_the_past_is_refused(root: Path, sentence) -> None:
    row = {"prompt": [{"role": "user", "content": "Hi"}], "completion": "Yes"}
    (root / "mine.jsonl").write_text(json.dumps(row) + "\n")
    run, tokens = settings("data.path=mine.jsonl"), tiny.tiny_tokenizer()
    tokens.chat_template = "{{ messages|length }}" + tiny.TEMPLATE
    source = supervised_training(run, "sft").data
    with pytest.raises(DataError) as refused:
        data = worker.dataset.load_split(source, "train")
        read("sft", run, data, tokens)
    sentence(refused)


# The config.


def test_a_run_does_not_depend_on_the_trainings_before_it() -> None:
    one, other = settings(), settings("sft.epochs=3", "reward_model.path=make:tiny")
    assert check.config_hash(one) == check.config_hash(other)
    changes = resume.config_differences(check.dump_config(one), check.dump_config(other))
    assert set(changes) == {"sft.epochs", "reward_model.path"}
    resume._refuse_changes(changes, other.train.lr_scheduler)  # such a change is none


def test_what_is_null_is_as_in_model_and_data() -> None:
    run = settings("data.columns={answer: b}", "data.max_samples=3", "model.tokenizer=make:tiny")
    assert (
        supervised_training(run, "sft").model.path == "make:tiny"
        and supervised_training(run, "sft").data.path == "make:tiny"
    )
    assert (
        supervised_training(run, "sft").data.columns == {"answer": "b"}
        and supervised_training(run, "sft").data.max_samples == 3
    )
    other = settings("data.columns={answer: b}", "sft.data.path=make:tiny_pairs",
                     "sft.path=make:addition")  # fmt: skip
    assert supervised_training(other, "sft").model.path == "make:addition"
    assert (
        supervised_training(other, "sft").data.path == "make:tiny_pairs"
        and supervised_training(other, "sft").data.columns == {}
    )
    assert supervised_training(other, "reward_model").data.path == "make:tiny"


def test_a_model_of_another_kind_becomes_no_reward_model(here: None, root: Path) -> None:
    shutil.copytree(synthetic.resolve_model_path("make:tiny"), root / "odd")
    (root / "odd" / "model.safetensors").unlink()
    with pytest.raises(RunError, match="odd"):
        main.find_verb(["reward-model", *PAIRS, "model.path=./odd"])()
