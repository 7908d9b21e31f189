"""What happens between two steps: a line in the log, evaluation, checkpoints, whether to go on."""

from typing import Any

from rloo_cli.checkpoint import manifest, save
from rloo_cli.data.batch import Batch
from rloo_cli.evaluation.evaluate import evaluate_run
from rloo_cli.policy import offload
from rloo_cli.reporting import step_metrics
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import Run
from rloo_cli.utils import sweep_time_slices
from rloo_cli.utils.files import JsonObject, read_json


def evaluate_and_checkpoint(run: Run) -> bool:
    """Between two steps: evaluation and a checkpoint where they are due; whether to go on."""
    state, config = run.state, run.config
    last = state.step >= run.num_steps
    due = config.eval.at_start if not state.step else last or _is_due(state.step, config.eval.every)
    if due and run.step_progress is None and state.evaluated != state.step:
        evaluate_run(run)
        state.evaluated = state.step
    if state.step and (last or _is_due(state.step, config.checkpoint.every)):
        with run.clock.phase("save"):
            save.save_checkpoint(run)
            if not last:
                run.log.draw_curves(rate_limited=True)
    run.world.check_stop()
    if sweep_time_slices.is_sweep_trial() and not last:
        _wait_for_time_slice(run)
    return not last


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _wait_for_time_slice(run: Run) -> None:
    """Until it is this member's turn; what a run costs does not count what others take."""
    judge = getattr(run.judge, "reward", None)
    codes = [getattr(reward, "code", None) for reward in (*run.rewards, judge)]
    scores: list[Any] = [getattr(code, "model", None) for code in codes]
    models = [p.model for p in (run.policy, run.reference, run.value_model) if p is not None]
    models += [score.model for score in scores if hasattr(score, "by_class")]
    moved: list[Any] = []

    def away() -> None:
        tensors = [
            *offload.iter_model_tensors(models),
            *offload.iter_optimizer_tensors(run.optimizer),
        ]
        moved.extend(offload.offload_tensors(tensors))

    hooks = sweep_time_slices.TimeSliceHooks(
        lambda: _save_for_clone(run),
        away,
        lambda: offload.reload_tensors(moved),
        run.world.check_stop,
    )
    run.clock.leave_out(sweep_time_slices.wait_in_sweep(run.state.step, hooks))


def _save_for_clone(run: Run) -> str | None:
    """A checkpoint of this very place, for a clone; None where there is none, or it failed."""
    save.save_checkpoint(run)
    if run.saved_position != run.position:
        return None
    own = run.folder / manifest.checkpoint_name(run.position)
    came: str | None = read_json(run.folder / "run.json").get("came_from")
    return str(own.absolute()) if own.is_dir() else came


def log_step(run: Run, batch: Batch, updates: UpdateMetrics) -> None:
    """Hand a finished step to the log: its metrics, and what their means were taken over."""
    state, settings = run.state, run.config.algorithm
    row: JsonObject = {"step": state.step}
    row |= step_metrics.rollout_metrics(
        batch, _algorithm_option(settings, "advantage_scale") == "batch"
    )
    beta = (
        0.0
        if _algorithm_option(settings, "kl_in") == "none"
        else _algorithm_option(settings, "beta")
    )
    row |= step_metrics.advantage_metrics(batch, beta or 0.0) | updates.to_metrics()
    row |= run.clock.lap()
    row |= step_metrics.speed_metrics(
        batch, updates, row, run.layout_choice.layout, settings.num_iterations, run.world
    )
    row |= _staleness_metrics(batch, state.updates - updates.num_updates)
    row |= {
        "num_tokens": state.tokens,
        "episode": state.episodes,
        "eps": state.episodes / run.clock.elapsed(),
        "epoch": state.place / len(run.prompts),
        "updates": state.updates,
        "data/dropped_long": run.prompts.dropped,
        "data/truncated": run.prompts.truncated,
    }
    counts = step_metrics.mean_counts(batch, updates) | {"step_time": row["step_time"]}
    run.log.step(row, counts, batch, run.num_steps)


def _algorithm_option(settings: Any, name: str) -> Any:
    return getattr(settings, name, None)  # not every algorithm has every switch


def _staleness_metrics(batch: Batch, num_updates: int) -> dict[str, float]:
    ages = [num_updates - r.weight_version for g in batch.groups for r in g.rollouts]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
