"""`rloo recipes`: list, show NAME, copy NAME FILE."""

import json
import shutil
from pathlib import Path

from rloo_cli.cli import answers
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config.pasted import refuse_unknown_name
from rloo_cli.utils import paths
from rloo_cli.utils.errors import refuse


def run(args: list[str]) -> int:
    """The verb. Raises ConfigError for an unknown recipe, or an existing file."""
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
        refuse_unknown_name("recipe", name, files, "rloo recipes show NAME", "rloo recipes")
    return files[name]


def _copy_recipe(source: Path, target: Path) -> None:
    if target.suffix not in (".yaml", ".yml"):
        fix = f"rloo recipes copy {source.stem} {target}.yaml"
        why = f"a recipe is a YAML file; found {target.suffix or 'no ending'}"
        refuse("command line", f"{target} does not end in .yaml", fix, why)
    if target.exists():
        fix = f"rloo recipes copy {source.stem} {target.with_stem(f'{target.stem}_2')}"
        refuse("command line", f"{target} exists", fix, "existing files are not overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    print(f"wrote {target}. Next: rloo train +recipe={target}")
