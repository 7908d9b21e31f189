"""The moment an attempt at a run begins: its folder is brought back to where it goes on."""

from dataclasses import asdict
from pathlib import Path

from rloo_cli.checkpoint import save, manifest, restore, resume, rollback
from rloo_cli.utils import paths
from rloo_cli.utils.errors import DataError, Problem
from rloo_cli.utils.files import update_json, write_text
from rloo_cli.run import Run
from rloo_cli.data.prompts import Prompts
from rloo_cli.checkpoint.resume import Start
from rloo_cli.config.schema import RunConfig


def begin(run: Run, start: Start) -> None:
    """Everything fits: the folder is this attempt's, and stays, whatever happens from here on.

    Rank 0 brings it back; all ranks restore.
    """
    run.world.check_stop()
    run.renames = run.world.first(lambda: _folder(run, start))
    if start.checkpoint is not None:
        run.world.each(lambda: restore.restore(run, Path(str(start.checkpoint))))
        came = paths.shown(start.checkpoint)
        run.log.note(f"goes on from {came}, step {run.state.step} of {run.steps}")
    if run.world.is_main:
        run.ledger.open(run.prompts, run.config, run.state.place, run.state.step)


def _folder(run: Run, start: Start) -> bool:
    """Bring the run's folder back to where it goes on; whether folders can be renamed there."""
    save.check_room(run)
    for note in rollback.take(start):
        run.log.note(note)
    renames = rollback.renames(start.folder, start.attempt)
    given = resume.config_file(start.folder, start.attempt)
    if given.is_file():
        write_text(start.folder / "config.yaml", given.read_text())
    update_json(
        start.folder / "run.json",
        state="training",
        began=start.attempt,
        fingerprint=run.prompts.fingerprint,
        prompts=len(run.prompts),
        checkpoint=start.checkpoint.name if start.checkpoint else None,
        came_from=str(start.checkpoint) if start.checkpoint else None,
        save_method="rename" if renames else "manifest",
        forward={
            **asdict(run.level),
            "rows": run.limits.rows,
            "old_logp": run.separate or "the training forward's",
            "engine": run.config.distributed.engine,
            "ranks": run.world.size,
        },
    )
    return renames


def same_data(start: Start, prompts: Prompts, config: RunConfig) -> None:
    """Raises DataError when the data is not what the checkpoint's order was made of."""
    if start.checkpoint is None or config.resume_allow_changes:
        return
    state = manifest.state(start.checkpoint)
    before, limit = state["fingerprint"], state["config"]["data"]["max_prompt_length"]
    if before != prompts.fingerprint:
        why = f"{len(prompts)} prompts, fingerprint {prompts.fingerprint}; it was {before}"
        as_it_was = "the data as it was"
        if limit is not None and config.data.max_prompt_length is None:
            as_it_was = f"data.max_prompt_length={limit}, as it was, and {as_it_was}"
        raise DataError(
            Problem(
                "the data changed since the checkpoint: prompts would be skipped or repeated",
                f"data.path, {start.checkpoint}",
                why,
                f"{as_it_was}, or resume_allow_changes=true (it is recorded)",
            )
        )
