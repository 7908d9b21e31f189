"""The fate of every prompt: `ledger.jsonl` in the run's folder, a line per step.

Every sampled prompt has one fate, the first of these that applies:

    resampled   replaced by a new prompt, because all its scores are equal
                (algorithm.zero_std_groups=resample)
    unscorable  fewer than two of its completions have a score (none, where K is 1)
    dropped     left out, because all its scores are equal (zero_std_groups=drop, or resample
                without a round left)
    masked      none of its completions with an advantage is in the loss
                (algorithm.mask_truncated_completions)
    skipped     its update was skipped: the numbers were not finite
                (train.on_nonfinite=skip)
    trained     in the loss of an update

An example that data.overlong=filter left out is never sampled: the header lists it in `filtered`.

The file has lines of strict JSON, each appended by one write. The header has everything that the
order of the prompts depends on and its start. `rows` are numbers of examples, counted from 0 in
data.split after data.filter and max_samples, and in a mixture through all sources one after the
other (`mixture` describes them). A step's line has the number of prompts that it took (`draws`)
from the position `place` of the order on, their `epochs`, their `rows` in that order, and the
positions with each fate. With generation.overlap=carry a step takes prompts that were drawn in
earlier steps: `draws` and `place` count the taken ones, the fates name their positions, and
`pending` lists those drawn when the step's batch was put together that wait for a later step. So
place + draws + the number of pending ones is always the number of drawn prompts. `check` is a
hash of the line and of the line before it. Nothing depends on time, process or restarts (except
with carry), so a resumed run's ledger is an undisturbed run's, byte for byte. If a resumed run
was allowed another order (other data, other seed), a second header records it.

Imports no torch: `rloo ledger` reads this file too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject, check_folder_present

if TYPE_CHECKING:
    from rloo_cli.data.batch import Batch, Group
    from rloo_cli.data.prompts import Prompts


LEDGER_FILE = "ledger.jsonl"
LEDGER_FORMAT = 1
PROMPT_FATES = ("trained", "dropped", "resampled", "unscorable", "masked", "skipped")


class PromptLedger:
    """Writes the fate of each step's prompts. `open` it before the first `step`."""

    def __init__(self, folder: Path):
        self.path = folder / LEDGER_FILE
        self.num_steps = self.prompt_offset = self.min_scored = 0
        self.last_check = ""  # `check` of the last line
        self.prompts: Prompts | None = None

    def open(self, prompts: Prompts, num_generations: int, prompt_offset: int, step: int) -> None:
        """Begin, or continue, after `step` steps and `prompt_offset` prompts.

        Raises DataError (exit 4) if an existing file ends at another step or prompt.
        """
        self.prompts, self.num_steps, self.prompt_offset = prompts, step, prompt_offset
        self.min_scored = min(2, num_generations)
        header = {
            "ledger": LEDGER_FORMAT,
            "step": step,
            "place": prompt_offset,
            "prompts": len(prompts),
            "data_rows": len(prompts) + len(prompts.overlong_examples),
            "filtered": list(prompts.overlong_examples),
            "cut": prompts.truncated,
            "seed": prompts.seed,
            "shuffle": prompts.shuffle,
            "fingerprint": prompts.fingerprint,
        }
        if prompts.mixture:
            header["mixture"] = [asdict(source) for source in prompts.mixture]
        old: JsonObject = {}
        end = step, prompt_offset
        for entry in read_ledger_entries(self.path) if self.path.is_file() else []:
            old = entry if "ledger" in entry else old
            end, self.last_check = position_after(entry), entry["check"]
        if end != (step, prompt_offset):
            what = f"{self.path} does not match the run's position"
            why = (
                f"it ends after step {end[0]}, place {end[1]}; the run continues after step"
                f" {step}, place {prompt_offset}"
            )
            fix = f"move it away: mv {self.path} {self.path}.old"
            refuse(str(self.path), what, fix, why, error=DataError)
        compared = {*header, *old} - {"step", "place", "check"}
        if any(old.get(k) != header.get(k) for k in compared):
            self._append_entry(header)

    def _is_drawn_prompt(self, group: Group, index: int) -> bool:
        """Whether a group has the prompt that the order has there."""
        assert self.prompts is not None
        if any(r.opening_ids is not None for r in group.rollouts):
            # The output of its environment's reset is part of its ids; the row is unchanged.
            return group.prompt == self.prompts.prompts[index]
        return group.prompt_ids == self.prompts.prompt_ids[index]

    def step(
        self,
        batch: Batch,
        prompt_offset: int,
        num_updates: int,
        updated_groups: Collection[int] | None = None,
    ) -> None:
        """Write a finished step, in which `num_updates` optimizer updates were made.

        `prompt_offset` prompts were consumed before it. `updated_groups` are the groups of those
        updates, if only some were updated. Raises RuntimeError (a bug) when a prompt is
        missing, occurs twice, or is not the one that the order has at its position.
        """
        assert self.prompts is not None, "not opened"
        if (batch.step, prompt_offset) != (self.num_steps, self.prompt_offset):
            done = f"the ledger is at step {self.num_steps}, place {self.prompt_offset}"
            raise RuntimeError(f"step {batch.step} at place {prompt_offset}: {done}")
        step, offsets = batch.step + 1, _step_offsets(batch, prompt_offset)
        indices = {offset: self.prompts.index_at(offset) for offset in offsets}
        for group in batch.groups:
            index = indices.get(group.prompt_offset)
            if index is None or not self._is_drawn_prompt(group, index):
                raise RuntimeError(f"step {step}: draw {group.prompt_offset} is another prompt")
        if len({g.prompt_offset for g in batch.groups}) != len(batch.groups):
            raise RuntimeError(f"step {step}: a draw occurs twice")
        if len(indices) != batch.draws:
            raise RuntimeError(f"step {step}: {len(indices)} draws, but {batch.draws} were taken")
        fates = self._prompt_fates(batch, num_updates, updated_groups)
        fates |= {offset: "resampled" for offset in offsets if offset not in fates}
        entry: JsonObject = {
            "step": step,
            "place": prompt_offset,
            "draws": batch.draws,
            "epochs": sorted({offset // len(self.prompts) for offset in offsets}),
            "updates": num_updates,
            "rows": [int(self.prompts.example_numbers[i]) for i in indices.values()],
        }
        for fate in PROMPT_FATES:
            if met := [offset for offset in offsets if fates[offset] == fate]:
                entry[fate] = met
        if batch.pending is not None:
            entry["pending"] = batch.pending
        self._append_entry(entry)
        self.num_steps, self.prompt_offset = step, prompt_offset + batch.draws

    def _prompt_fates(
        self, batch: Batch, num_updates: int, updated_groups: Collection[int] | None
    ) -> dict[int, str]:
        """Prompt offset -> fate, for the prompts that were not replaced."""
        counted = batch.scorable & (batch.scorable.sum(1, keepdim=True) >= self.min_scored)
        if batch.usable is not None:  # an algorithm whose baseline needs no siblings
            counted = counted | batch.usable
        scored = counted.any(1).tolist()
        learnt = (counted & ~batch.masked & (batch.rollout_values("length") > 0)).any(1).tolist()
        fates = {}
        for i, group in enumerate(batch.groups):
            if not scored[i]:
                fate = "unscorable"
            elif i not in batch.active:
                fate = "dropped"
            elif not learnt[i]:
                fate = "masked"
            else:
                missed = not num_updates or (updated_groups is not None and i not in updated_groups)
                fate = "skipped" if missed else "trained"
            fates[group.prompt_offset] = fate
        return fates

    def _append_entry(self, entry: JsonObject) -> None:
        self.last_check = entry_check(entry, self.last_check)
        check_folder_present(self.path)
        with self.path.open("ab") as file:
            file.write((json.dumps(entry | {"check": self.last_check}) + "\n").encode("ascii"))


def _step_offsets(batch: Batch, prompt_offset: int) -> Sequence[int]:
    """The prompt offsets with each fate in a step, in order."""
    if batch.pending is None:
        return range(prompt_offset, prompt_offset + batch.draws)
    return sorted([*(group.prompt_offset for group in batch.groups), *batch.left_out])


def entry_check(entry: JsonObject, previous_check: str) -> str:
    """The `check` of a line, from its other fields and the `check` of the line before it."""
    return hashlib.sha256((previous_check + json.dumps(entry)).encode("ascii")).hexdigest()[:8]


def position_after(entry: JsonObject) -> tuple[int, int]:
    """How many steps are done and prompts consumed after a line."""
    return entry["step"], entry["place"] + entry.get("draws", 0)


def read_ledger_entries(path: Path) -> Iterator[JsonObject]:
    """The lines of a ledger, each a JSON object with `step`, `place` and `check`, one by one.

    Raises DataError (exit 4) at the first other line, when it gets there.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.endswith(b"\n"):
                why = f"{len(line)} bytes without a line end"
                fix = "resume the run: it returns to its last checkpoint, and so does the ledger"
                refuse(where, "the last line of the ledger is cut off", fix, why, error=DataError)
            try:
                entry = json.loads(line)
                if not all(type(entry[k]) is int for k in ("step", "place")):
                    raise ValueError
                entry |= {"check": str(entry["check"])}
            except (ValueError, KeyError, TypeError):
                text = line[:60].rstrip(b"\n").decode("ascii", "backslashreplace")
                why = f"expected an object with step, place and check, found {text!r}"
                fix = "restore the line; if it was never changed, please report it"
                what = "a line of the ledger is not valid"
                refuse(where, what, fix, why, error=DataError)
            yield entry
