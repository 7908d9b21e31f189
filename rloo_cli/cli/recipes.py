"""`rloo recipes`: list, show NAME, copy NAME FILE."""

import json
import shutil
from pathlib import Path

from rloo_cli.cli import answers
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError for an unknown recipe, or a file that is there already."""
    options = parse_verb("recipes", args)
    if options.action == "show":
        text = _recipe_file(options.recipe).read_text()
        values = {"recipe": options.recipe, "text": text}
        print(json.dumps(values, indent=2) if options.json else text.rstrip())
    elif options.action == "copy":
        with answers.json_answer(options.json) as answer:
            _copy_recipe(_recipe_file(options.recipe), Path(options.file))
            answer["copied"] = options.file
    else:
        headlines = {n: recipe_headline(p) for n, p in paths.recipe_files().items()}
        lines = [f"{name:<14} {text}" for name, text in headlines.items()]
        print(json.dumps(headlines, indent=2) if options.json else "\n".join(lines))
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
