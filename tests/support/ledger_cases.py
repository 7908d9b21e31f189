"""Builds ledgers: of real runs, and of steps made up without a model."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from loop_cases import make

from rloo_cli.data.batch import Batch, Rollout
from rloo_cli.data.prompts import Prompts
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, PromptLedger, entry_check
from rloo_cli.run import Run

Row = dict[str, Any]
K = 2


def lines(folder: Path) -> list[Row]:
    """Every line of a folder's ledger, as strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (folder / LEDGER_FILE).read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def six(
    folder: Path, *words: str, steps: int = 2, rewards: dict[str, Callable[..., Any]] | None = None
) -> Run:
    """A real run of steps of four prompts over a data set of six."""
    length = (f"max_steps={steps}", "data.max_samples=6", "data.eval_split=null")
    folder.mkdir(exist_ok=True)
    return make(folder, *length, *words, rewards=rewards)


def prompts(n: int = 6, filtered: Sequence[int] = (), **changes: Any) -> Prompts:
    """`n` prompts of one token each; `filtered` are rows that are not among them."""
    numbers = [row for row in range(n + len(filtered)) if row not in filtered]
    facts = {"shuffle": True, "seed": 3, "fingerprint": "data"} | changes
    return Prompts(
        prompts=[f"{row}" for row in numbers],
        prompt_ids=[[row] for row in numbers],
        examples=[{} for _ in numbers],
        conversational=False,
        example_numbers=numbers,
        overlong_examples=list(filtered),
        dropped=len(filtered),
        **facts,
    )


def batch(
    found: Prompts, step: int, start: int, said: Sequence[str], k: int = K, extra: int = 0
) -> Batch:
    """A step's batch whose draws are `said` to be, by name of fate; `extra` replaced at the end.

    A draw that is `half` masked has one row left in the loss.
    """
    groups = found.groups_at(start, len(said) + extra)
    kept = [g for g, fate in zip(groups, said, strict=False) if fate != "resampled"]
    fates = [fate for fate in said if fate != "resampled"]
    for group in kept:
        group.rollouts = [Rollout([5, 1], "x", "stop", True, 0, 0) for _ in range(k)]
    score = torch.arange(len(kept) * k, dtype=torch.float64).view(len(kept), k)
    scorable = torch.ones(len(kept), k, dtype=torch.bool)
    masked = torch.zeros(len(kept), k, dtype=torch.bool)
    for i, fate in enumerate(fates):
        if fate == "unscorable":
            scorable[i, :] = False
            scorable[i, : min(1, k - 1)] = True  # one alone, where siblings are needed
        if fate in ("masked", "half"):
            masked[i, : k if fate == "masked" else 1] = True
    active = [i for i, fate in enumerate(fates) if fate != "dropped"]
    return Batch(
        step=step, groups=kept, names=["r"], raw=score[None], score=score, shaped=score,
        scorable=scorable, masked=masked, active=active, draws=len(groups),
    )  # fmt: skip


def write(
    folder: Path, steps: Sequence[Sequence[str]], found: Prompts | None = None, k: int = K
) -> Path:
    """A ledger of made-up steps, each a list of fates; `skipped` ones all in steps of their own."""
    found, ledger = found or prompts(), PromptLedger(folder)
    ledger.open(found, k, 0, 0)
    start = 0
    for number, said in enumerate(steps):
        ledger.step(batch(found, number, start, said, k), start, int("skipped" not in said))
        start += len(said)
    return folder


def ended(folder: Path, **progress: int) -> Path:
    """What a run that ended by itself leaves beside its ledger; `progress` differs from it."""
    last = lines(folder)[-1]
    updates = sum(line.get("updates", 0) for line in lines(folder))
    got = {"step": last["step"], "place": last["place"] + last.get("draws", 0)}
    got |= {"updates": updates, "tokens": 7} | progress
    facts = {"state": "finished", "progress": got, "fingerprint": "data"}
    (folder / "run.json").write_text(json.dumps(facts))
    rows = [{"step": 0, "eval_reward": 0.0}, {"step": last["step"], "reward": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def edit(folder: Path, change: Callable[[list[Row]], Any], seal: bool = True) -> Path:
    """Change a ledger's lines; with `seal`, each line's check is put right again."""
    rows = lines(folder)
    change(rows)
    before = ""
    for row in rows if seal else []:
        row["check"] = before = entry_check({k: v for k, v in row.items() if k != "check"}, before)
    (folder / LEDGER_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
