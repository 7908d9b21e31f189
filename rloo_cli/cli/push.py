"""`rloo push RUN`: the trained model with its card to a hub, private unless it is said otherwise.

The token is the hub's own (`hf auth login`, or HF_TOKEN). It may be repeated: what is there already
is not sent again. Exits with 10 where the hub refuses.
"""

import json
from pathlib import Path

from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.inspection.model_card import HUB_NAME, model_card
from rloo_cli.inspection.run_folders import find_run_folder
from rloo_cli.inspection.run_record import inspect_run_folder
from rloo_cli.utils.console import show_control_characters
from rloo_cli.utils.errors import TrackerError, refuse
from rloo_cli.utils.files import JsonObject

CARD_FILE = "README.md"
LEFT_OUT = ("trainer", "MANIFEST.json", CARD_FILE)  # of a checkpoint: what only a resume needs


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError (no run, no model, a public one), TrackerError (the hub)."""
    options = parse_verb("push", args)
    folder = find_run_folder(options.run, "push")
    model = _model_folder(folder, options.checkpoint)
    card, files = model_card(inspect_run_folder(folder), options.dataset), _model_files(model)
    whole_name = options.repo if "/" in (options.repo or "/") else f"me/{options.repo}"
    if not options.dry_run and not HUB_NAME.fullmatch(whole_name or ""):
        what = (
            f"--repo {options.repo!r} is not a repository" if options.repo else "which repository?"
        )
        why = "its name is ORG/NAME, or NAME for your own account"
        refuse("command line", what, f"rloo push {folder.name} --repo ORG/{folder.name}", why)
    told = {"repo": options.repo, "files": sorted(files), "private": not options.public}
    if options.dry_run:
        shown = (
            json.dumps(told | {"card": card}, indent=2) if options.json else _listing(card, files)
        )
        print(shown)
        return 0
    commit = {"commit_message": options.message, "revision": options.revision}
    told["url"] = _send_model(options.repo, options.public, card, files, commit)
    print(json.dumps(told, indent=2) if options.json else told["url"])
    return 0


def _model_folder(folder: Path, checkpoint: str | None) -> Path:
    model = folder / (checkpoint or "final")
    if not (model / "config.json").is_file() and not (model / "adapter_config.json").is_file():
        there = sorted(path.parent.name for path in folder.glob("*/config.json"))
        fix = "--checkpoint NAME" if there else "rloo train ... resume=auto"
        refuse_unknown_name("model", checkpoint or "final", there, fix)
    return model


def _model_files(model: Path) -> dict[str, Path]:
    """Name in the repository -> file."""
    return {
        str(path.relative_to(model)): path
        for path in sorted(model.rglob("*"))
        if path.is_file() and path.relative_to(model).parts[0] not in LEFT_OUT
    }


def _listing(card: str, files: dict[str, Path]) -> str:
    sizes = [f"{path.stat().st_size / 2**20:10.2f} MiB  {name}" for name, path in files.items()]
    return show_control_characters("\n".join([card, *sizes]))


def _send_model(
    repo: str, public: bool, card: str, files: dict[str, Path], commit: JsonObject
) -> str:
    """Send everything as one commit, which has a message and a branch. -> the repository"""
    from huggingface_hub import CommitOperationAdd, HfApi  # lazy: one verb's
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # lazy: one verb's

    api = HfApi()
    adds = [CommitOperationAdd(CARD_FILE, card.encode())]
    adds += [CommitOperationAdd(name, path) for name, path in files.items()]
    try:
        url = api.create_repo(repo, private=not public, exist_ok=True)
        repo = url.repo_id  # with the account's name, which the hub adds where there is none
        if not public and not api.repo_info(repo).private:
            what = f"{repo} is public, and --public was not said"
            why = "without --public a model is sent only where not everybody can see it"
            refuse("command line", what, "--public, or another --repo", why)
        if commit["revision"] is not None:
            api.create_branch(repo, branch=commit["revision"], exist_ok=True)
        api.create_commit(repo, adds, **commit)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "hf auth login, or HF_TOKEN; the token needs the right to write"
        if isinstance(error, HFValidationError):
            fix = "--repo ORG/NAME, of letters, digits, -, _ and ."
        elif not isinstance(error, HfHubHTTPError):  # the hub has not answered
            fix = "push again where the hub can be reached, without HF_HUB_OFFLINE"
        refuse("command line", f"the hub does not take {repo}", fix, why, error=TrackerError)
    return str(url)
