"""What happens between two steps: a line in the log, evaluation, checkpoints, whether to go on."""

from typing import Any

from rloo_cli.checkpoint import manifest, save
from rloo_cli.data.batch import Batch
from rloo_cli.evaluation.evaluate import evaluate
from rloo_cli.policy import offload
from rloo_cli.reporting import step_metrics
from rloo_cli.reporting.update_metrics import Updates
from rloo_cli.run import Run
from rloo_cli.train import sweep_turns
from rloo_cli.utils.files import read_json


def pause(run: Run) -> bool:
    """Between two steps: evaluation and a checkpoint where they are due; whether to go on."""
    state, config = run.state, run.config
    last = state.step >= run.steps
    due = config.eval.at_start if not state.step else last or _at(state.step, config.eval.every)
    if due and run.cycle is None and state.evaluated != state.step:
        evaluate(run)
        state.evaluated = state.step
    if state.step and (last or _at(state.step, config.checkpoint.every)):
        with run.clock.phase("save"):
            save.save(run)
            if not last:
                run.log.draw_curves(now_and_then=True)
    run.world.check_stop()
    if sweep_turns.taken() and not last:
        _wait(run)
    return not last


def _at(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _wait(run: Run) -> None:
    """Until it is this member's turn; what a run costs does not count what others take."""
    judge = getattr(run.judge, "reward", None)
    codes = [getattr(reward, "code", None) for reward in (*run.rewards, judge)]
    scores: list[Any] = [getattr(code, "model", None) for code in codes]
    models = [p.model for p in (run.policy, run.reference, run.critic) if p is not None]
    models += [score.model for score in scores if hasattr(score, "by_class")]
    moved: list[Any] = []

    def away() -> None:
        tensors = [*offload.of_models(models), *offload.of_optimizer(run.optimizer)]
        moved.extend(offload.away(tensors))

    hooks = sweep_turns.Hooks(
        lambda: _saved(run), away, lambda: offload.back(moved), run.world.check_stop
    )
    run.clock.leave_out(sweep_turns.wait(run.state.step, hooks))


def _saved(run: Run) -> str | None:
    """A checkpoint of this very place, for a clone; None where there is none, or it failed."""
    save.save(run)
    if run.saved != run.place:
        return None
    own = run.folder / manifest.name(run.place)
    came: str | None = read_json(run.folder / "run.json").get("came_from")
    return str(own.absolute()) if own.is_dir() else came


def log_step(run: Run, batch: Batch, updates: Updates) -> None:
    """Hand a finished step to the log: its metrics, and what their means were taken over."""
    state, settings = run.state, run.config.algorithm
    row: dict[str, Any] = {"step": state.step}
    row |= step_metrics.of_rollouts(batch, _option(settings, "advantage_scale") == "batch")
    beta = 0.0 if _option(settings, "kl_in") == "none" else _option(settings, "beta")
    row |= step_metrics.of_advantages(batch, beta or 0.0) | updates.row()
    row |= run.clock.lap()
    row |= step_metrics.speed(
        batch, updates, row, run.level.layout, settings.num_iterations, run.world
    )
    row |= _staleness(batch, state.updates - updates.made)
    row |= {
        "num_tokens": state.tokens,
        "episode": state.episodes,
        "eps": state.episodes / run.clock.elapsed(),
        "epoch": state.place / len(run.prompts),
        "updates": state.updates,
        "data/dropped_long": run.prompts.dropped,
        "data/truncated": run.prompts.truncated,
    }
    counts = step_metrics.counts(batch, updates) | {"step_time": row["step_time"]}
    run.log.step(row, counts, batch, run.steps)


def _option(settings: Any, name: str) -> Any:
    return getattr(settings, name, None)  # not every algorithm has every switch


def _staleness(batch: Batch, now: int) -> dict[str, float]:
    ages = [now - r.weight_version for g in batch.groups for r in g.rollouts]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
