"""One rank: read config.yaml, build the run, train, save, say how it went.

Started by `launch` as `python -m rloo_cli.worker RUN_FOLDER`, or called from Python.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from rich.console import Console

from rloo_cli import checkpoint, config, curves
from rloo_cli.errors import OutOfMemory, Problem, RunError, Stopped
from rloo_cli.evaluate import evaluate
from rloo_cli.files import update_json, write_json
from rloo_cli.panel import before_after
from rloo_cli.parts import Run
from rloo_cli.run import make
from rloo_cli.schema import RunConfig
from rloo_cli.train import train

log = logging.getLogger("rloo")
Row = dict[str, Any]


def work(
    settings: RunConfig, folder: Path, functions: Mapping[str, Callable[..., Any]] | None = None
) -> Row:
    """Do a whole run in this process; its summary. Raises RunError.

    `functions`: rewards given as Python callables, by the name of their config entry.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(settings.seed)
    run = make(settings, folder, functions)
    try:
        return _whole(run)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            Problem(
                f"out of memory in step {run.state.step + 1}",
                str(run.world.device),
                str(error).splitlines()[0],
                "lower train.micro_batch_size or generation.max_completion_length",
            )
        ) from error
    finally:
        update_json(folder / "run.json", progress=run.state.dump())
        run.log.close()
        run.generator.close()


def _whole(run: Run) -> Row:
    for note in run.algorithm.warnings(run.config):
        run.log.note(f"warning: {note}")
    if run.log.display is not None:
        run.log.display.plan["max_steps"] = run.steps
    update_json(run.folder / "run.json", plan=run.log.display.plan if run.log.display else {})
    before, first = evaluate(run) if run.config.eval.at_start else ({}, [])
    start = run.clock.elapsed()
    train(run)
    seconds = run.clock.elapsed() - start
    after, last = evaluate(run)
    run.log.phase("saving")
    final = checkpoint.save_final(run.policy.model, run.tokenizer, run.folder)
    curves.draw(run.folder / "metrics.jsonl", run.folder / "curves.png", run.config.name or "")
    summary = {
        "before": before.get("eval_reward"),
        "after": after.get("eval_reward"),
        "seconds": round(seconds, 2),
        "steps": run.state.step,
        "updates": run.state.updates,
        "final": str(final),
    }
    write_json(run.folder / "summary.json", summary)
    run.log.close()
    _report(run, before, after, first, last)
    return summary


def _report(run: Run, before: Row, after: Row, first: list[Row], last: list[Row]) -> None:
    """The end of a run: held-out scores before and after, three problems, where things are."""
    console = Console(soft_wrap=not sys.stdout.isatty())
    if before and after:
        changed = [i for i in range(len(last)) if first[i]["score"] != last[i]["score"]]
        chosen = [*changed, *[i for i in range(len(last)) if i not in changed]][:3]
        problems = [
            {
                "prompt": first[i]["prompt"],
                "answer": _answer(first[i]["row"]),
                "before": first[i]["completion"],
                "after": last[i]["completion"],
            }
            for i in chosen
        ]
        console.print(before_after(before, after, problems))
    for name in ("final", "curves.png", "metrics.jsonl", "samples"):
        console.print(f"{name:<14} {run.folder / name}", highlight=False)


def _answer(row: Row) -> str:
    return str(next((row[c] for c in ("answer", "ground_truth", "solution") if c in row), ""))


def main() -> None:
    """The process that `launch` starts. Exits with the code of what stopped it."""
    folder = Path(sys.argv[1])
    facts = folder / "run.json"
    logs = folder / "logs" / "attempt_1"
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a file system without links has the folder all the same
        logs.with_name("latest").symlink_to(logs.name)
    logging.basicConfig(filename=logs / "rank_0.log", level=logging.INFO)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code, state = 1, "failed"
    try:
        work(config.read(folder / "config.yaml"), folder)
        code, state = 0, "finished"
    except RunError as error:
        log.error("%s", traceback.format_exc())
        _keep_detail(folder, error)
        print(_text(error), file=sys.stderr)
        code = error.code
        state = "stopped" if isinstance(error, Stopped) else "failed"
    except KeyboardInterrupt:
        log.error("interrupted")
        print("stopped by Ctrl-C; the model is not saved. Start it again to begin anew.")
        code, state = 130, "stopped"
    except Exception:
        log.error("%s", traceback.format_exc())
        traceback.print_exc()
        print(f"error: this is a bug in rloo; the log is in {logs}", file=sys.stderr)
    finally:
        update_json(facts, state=state, code=code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a reward thread that hangs must not keep the process


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(Problem("stopped by SIGTERM", fix="start the run again"))


def _text(error: RunError) -> str:
    if os.environ.get("RLOO_DEBUG"):
        return traceback.format_exc() + error.render()
    return error.render(as_json=os.environ.get("RLOO_ERRORS") == "json")


def _keep_detail(folder: Path, error: RunError) -> None:
    """What a reward error knows beyond its message: the call, its arguments, the trace."""
    detail = getattr(error, "detail", None)
    if detail:
        (folder / "debug").mkdir(exist_ok=True)
        text = json.dumps(detail, indent=2, default=str)
        (folder / "debug" / "reward_error.json").write_text(text)


if __name__ == "__main__":
    main()
