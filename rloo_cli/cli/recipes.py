"""`rloo recipes`: list, show NAME, copy NAME FILE."""

import json
import shutil
from pathlib import Path

from rloo_cli.cli import json_answer
from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem

USAGE = "rloo recipes, rloo recipes show NAME, or rloo recipes copy NAME my.yaml"


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError for an unknown recipe, or a file that is there already."""
    args, as_json = json_answer.take_json_flag(args)
    match args:
        case [] | ["list"]:
            headlines = {n: recipe_headline(p) for n, p in paths.recipe_files().items()}
            lines = [f"{name:<14} {text}" for name, text in headlines.items()]
            print(json.dumps(headlines, indent=2) if as_json else "\n".join(lines))
        case ["show", name]:
            text = _recipe_file(name).read_text()
            print(
                json.dumps({"recipe": name, "text": text}, indent=2) if as_json else text.rstrip()
            )
        case ["copy", name, target]:
            with json_answer.json_answer(as_json) as answer:
                _copy_recipe(_recipe_file(name), Path(target))
                answer["copied"] = target
        case _:
            what = f"rloo recipes {' '.join(args)}: not understood"
            why = "list takes no word after it, show takes one, and copy two"
            raise ConfigError(Problem(what, "command line", why, USAGE))
    return 0


def recipe_headline(path: Path) -> str:
    """The first comment line of a recipe."""
    return path.read_text().partition("\n")[0].lstrip("# ")


def _recipe_file(name: str) -> Path:
    files = paths.recipe_files()
    if name not in files:
        close = nearest_names(name, files)
        why = f"recipes: {', '.join(files)}"
        fix = f"rloo recipes show {close[0]}" if close else "rloo recipes"
        raise ConfigError(Problem(f"there is no recipe {name!r}", "command line", why, fix))
    return files[name]


def _copy_recipe(source: Path, target: Path) -> None:
    if target.suffix not in (".yaml", ".yml"):
        fix = f"rloo recipes copy {source.stem} {target}.yaml"
        why = f"a recipe is a file of YAML: found {target.suffix or 'no ending'}"
        raise ConfigError(Problem(f"{target} does not end in .yaml", "command line", why, fix))
    if target.exists():
        fix = f"rloo recipes copy {source.stem} {target.with_stem(f'{target.stem}_2')}"
        raise ConfigError(Problem(f"{target} exists", "command line", "it is left as it is", fix))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    print(f"{target} is yours: rloo train +recipe={target}")
