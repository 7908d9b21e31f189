"""`rloo verify-resume +recipe=NAME`: checks that a killed and resumed run equals an unbroken one.

Runs the user's recipe on this machine. Prints the first difference and exits with 20 if any.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check, compose
from rloo_cli.inspection.first_difference import difference_lines
from rloo_cli.inspection.resume_proof import MIN_STEPS, ResumeProof, proof_words, prove_resume
from rloo_cli.utils.errors import FOUND_CODE, refuse

USAGE = "rloo verify-resume +recipe=NAME [key=value ...] [--steps N] [--kill-in-step STEP]"


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for arguments that `rloo train` refuses too."""
    options, words = read_words(args)
    # Checked before training, with the arguments of both runs.
    composed = compose.compose_config(proof_words(words, options.steps, Path("runs")))
    config = check.check_config(composed)
    root = Path(config.root)
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=root))
    keep = True
    try:
        proof = prove_resume(
            words,
            config.updates_per_step,
            folder,
            options.steps,
            options.kill_in_step,
            options.inside_save,
            options.tolerance or 0.0,
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
    """The verb's flags, and the recipe's arguments."""
    options = parse_verb("verify-resume", args)
    words = options.overrides
    if options.kill_in_step is None:
        options.kill_in_step = options.steps - 1
    if options.steps < MIN_STEPS or not 1 <= options.kill_in_step <= options.steps:
        what = f"--steps {options.steps} --kill-in-step {options.kill_in_step}"
        why = f"expected at least {MIN_STEPS} steps, and a kill in one of them"
        refuse("command line", what, "--steps 6 --kill-in-step 5", why)
    if not any(word.lstrip("+").startswith("recipe=") for word in words):
        why = f"found {' '.join(words) or 'nothing'}, expected +recipe=NAME"
        refuse("command line", "rloo verify-resume needs a recipe", USAGE, why)
    return options, words


def _proof_lines(proof: ResumeProof, folder: Path | None) -> list[str]:
    where = f"killed in step {proof.killed_in_step} of {proof.steps}"
    lines = [f"{where}, resumed from {proof.resumed_from}"]
    if proof.exact:
        lines.append("equal: metrics, samples, ledger and final weights")
    else:
        lines += difference_lines(proof.difference)
        lines.append(f"final weights {'equal' if proof.weights_equal else 'differ'}")
        lines.append(f"ledger {'equal' if proof.ledgers_equal else 'differs'}")
    return [*lines, f"kept: {folder}"] if folder else lines
