"""`rloo push RUN`: upload the trained model with its card to the hub, private by default.

The token comes from `hf auth login` or HF_TOKEN. You can repeat it: existing files are not sent
again. Exits with 10 if the hub refuses.
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
LEFT_OUT = ("trainer", "MANIFEST.json", CARD_FILE)  # of a checkpoint: only needed to resume


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError (run, model, public repository), TrackerError (hub)."""
    options = parse_verb("push", args)
    folder = find_run_folder(options.run, "push")
    model = _model_folder(folder, options.checkpoint)
    card, files = model_card(inspect_run_folder(folder), options.dataset), _model_files(model)
    whole_name = options.repo if "/" in (options.repo or "/") else f"me/{options.repo}"
    if not options.dry_run and not HUB_NAME.fullmatch(whole_name or ""):
        what = (
            f"--repo {options.repo!r} is not a valid name" if options.repo else "--repo is missing"
        )
        why = "write ORG/NAME, or NAME for your own account"
        refuse("command line", what, f"rloo push {folder.name} --repo ORG/{folder.name}", why)
    sent = {"repo": options.repo, "files": sorted(files), "private": not options.public}
    if options.dry_run:
        shown = (
            json.dumps(sent | {"card": card}, indent=2) if options.json else _listing(card, files)
        )
        print(shown)
        return 0
    commit = {"commit_message": options.message, "revision": options.revision}
    sent["url"] = _send_model(options.repo, options.public, card, files, commit)
    print(json.dumps(sent, indent=2) if options.json else sent["url"])
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
    """Upload everything as one commit. -> the repository"""
    from huggingface_hub import CommitOperationAdd, HfApi  # lazy: one verb's
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # lazy: one verb's

    api = HfApi()
    adds = [CommitOperationAdd(CARD_FILE, card.encode())]
    adds += [CommitOperationAdd(name, path) for name, path in files.items()]
    try:
        url = api.create_repo(repo, private=not public, exist_ok=True)
        repo = url.repo_id  # with the account name, which the hub adds if missing
        if not public and not api.repo_info(repo).private:
            what = f"{repo} is public, but --public is not given"
            why = "without --public, a model is only sent to a private repository"
            refuse("command line", what, "--public, or another --repo", why)
        if commit["revision"] is not None:
            api.create_branch(repo, branch=commit["revision"], exist_ok=True)
        api.create_commit(repo, adds, **commit)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fix = "hf auth login, or HF_TOKEN; the token needs write access"
        if isinstance(error, HFValidationError):
            fix = "--repo ORG/NAME, using letters, digits, -, _ and ."
        elif not isinstance(error, HfHubHTTPError):  # the hub did not answer
            fix = "push again with network access, without HF_HUB_OFFLINE"
        refuse("command line", f"the hub refuses {repo}", fix, why, error=TrackerError)
    return str(url)
