"""`rloo verify-resume +recipe=NAME [key=value ...]`: does a killed run end as one left alone?

    rloo verify-resume +recipe=my.yaml    6 steps twice; the second is killed in step 5 and goes on
    --steps N --kill-in-step S            how many steps, and in which it is killed
    --inside-save                         killed inside its first save instead
    --tolerance 1e-5                      numbers as near as that are equal (0 = bit for bit)
    --keep                                keep both folders; they are kept where they differ
    --json                                the result as data

On the user's own recipe and machine. Exits with 20 where anything differs, and says what first.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from rloo_cli.cli.run_arguments import RunArgumentParser
from rloo_cli.config import check, compose
from rloo_cli.inspection.first_difference import difference_lines
from rloo_cli.inspection.resume_proof import MIN_STEPS, ResumeProof, proof_words, prove_resume
from rloo_cli.utils.errors import FOUND_CODE, ConfigError, Problem

USAGE = "rloo verify-resume +recipe=NAME [key=value ...] [--steps N] [--kill-in-step S]" \
    " [--inside-save] [--tolerance X] [--keep] [--json]"  # fmt: skip


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for words that `rloo train` would refuse too."""
    options, words = read_words(args)
    # Checked before anything trains, with the words that both runs get.
    composed = compose.compose_config(proof_words(words, options.steps, Path("runs")))
    config = check.check_config(composed)
    root = Path(config.root)
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=root))
    keep = True
    try:
        proof = prove_resume(
            words,
            config,
            folder,
            options.steps,
            options.kill_in_step,
            options.inside_save,
            options.tolerance,
            say=(lambda text: None) if options.json else print,
        )
        keep = options.keep or not proof.exact
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        kept = {"folder": str(folder) if keep else None}
        print(json.dumps(proof.to_json() | kept, indent=2))
    else:
        print("\n".join(_proof_lines(proof, folder if keep else None)))
    return 0 if proof.exact else FOUND_CODE


def read_words(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The verb's flags, and the words of the recipe."""
    parser = RunArgumentParser("verify-resume", USAGE)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill-in-step", type=int)
    parser.add_argument("--tolerance", type=float, default=0.0)
    for flag in ("--inside-save", "--keep", "--json"):
        parser.add_argument(flag, action="store_true")
    options, words = parser.parse_known_args(args)
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        parser.error(f"unrecognized arguments: {unknown[0]}")
    words = [word for word in (options.run, *words) if word]
    if options.kill_in_step is None:
        options.kill_in_step = options.steps - 1
    if options.steps < MIN_STEPS or not 1 <= options.kill_in_step <= options.steps:
        what = f"--steps {options.steps} --kill-in-step {options.kill_in_step}"
        why = f"at least {MIN_STEPS} steps, and killed in one of them"
        raise ConfigError(Problem(what, "command line", why, "--steps 6 --kill-in-step 5"))
    if not any(word.lstrip("+").startswith("recipe=") for word in words):
        why = f"found {' '.join(words) or 'nothing'}, and no +recipe=NAME"
        raise ConfigError(Problem("rloo verify-resume needs a recipe", "command line", why, USAGE))
    return options, words


def _proof_lines(proof: ResumeProof, folder: Path | None) -> list[str]:
    where = f"killed in step {proof.killed_in_step} of {proof.steps}"
    lines = [f"{where}, went on from {proof.resumed_from}"]
    if proof.exact:
        lines.append("equal: metrics, samples, ledger and final weights")
    else:
        lines += difference_lines(proof.difference)
        lines.append(f"final weights {'equal' if proof.weights_equal else 'differ'}")
        lines.append(f"ledger {'equal' if proof.ledgers_equal else 'differs'}")
    return [*lines, f"kept: {folder}"] if folder else lines
