"""Converts an OpenRLHF or verl run, once it is read, to the text of a recipe that means the same.

Both count a batch in prompts, and an update's part of it; neither number depends on how many
processes there were. What a setting becomes stands in foreign_names.txt; here is what the two
tools' rules share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.foreign_table import BY_RULE, NO_KEY, find_foreign_row
from rloo_cli.compat.migrate.recipe import Recipe, schema_field
from rloo_cli.compat.migrate.sections import slug_name, write_mixture
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

TO_GO = ("reinforce_pp", "reinforce_pp_baseline", "ppo")  # whose KL is charged token by token
SIBLINGS = ("rloo", "grpo", "reinforce_pp_baseline")  # that need two completions of a prompt
GROUPED = ("grpo", "dr_grpo")


@dataclass
class ForeignRecipe(Recipe):
    """A recipe whose old flags have the names that the rules know, whatever was typed."""

    typed: dict[str, str] = field(default_factory=dict)  # known name -> as it was typed

    def original_text(self, name: str) -> str:
        """The text of an old setting as it was written; "" if it was not written."""
        if name not in self.original_flags:
            return ""
        text = super().original_text(name)
        return text.replace(name, self.typed.get(name, name), 1)


def start_recipe(tool: str, settings: JsonObject, notes: list[str], form: str) -> ForeignRecipe:
    """A recipe with the settings under the names that the rules know."""
    known: JsonObject = {}
    typed: dict[str, str] = {}
    for name, value in settings.items():
        row = find_foreign_row(tool, name)
        first = row.names[0] if row and name in row.names else name
        known[first], typed[first] = value, name
    return ForeignRecipe(known, form, notes=list(notes), typed=typed)


def put_table_rows(recipe: ForeignRecipe, tool: str) -> list[str]:
    """Write what no rule took, by the table alone. Returns the settings that are in no row."""
    unknown = []
    for name, value in list(recipe.flags.items()):
        del recipe.flags[name]
        row, text = find_foreign_row(tool, name), recipe.original_text(name)
        if row is None:
            unknown.append(text)
        elif row.key in (BY_RULE, NO_KEY) or value is None:
            said = "off, as here" if value in (None, False) else row.answer
            recipe.dropped.append(f"{text}: {said}")
        elif schema_field(row.key, recipe.algorithm) is None:
            recipe.dropped.append(f"{text}: {row.note or 'algorithm=' + recipe.algorithm} has none")
        else:
            recipe.put(row.key, _as_typed(row.key, value, recipe.algorithm), text)
    return unknown


def _as_typed(key: str, value: object, algorithm: str) -> object:
    """A whole number as a float where our key holds one."""
    info = schema_field(key, algorithm)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_int and info and "float" in str(info.annotation) else value  # type: ignore[arg-type]


def take_int(recipe: Recipe, name: str, default: int) -> int:
    """Take a whole number of 1 or more; the default with a note where it is not filled in.

    Raises ConfigError for another value.
    """
    text, value = recipe.original_text(name), recipe.take(name, default)
    if isinstance(value, str) and "$" in value:
        recipe.notes.append(f"{text} is not filled in: {default} is assumed")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        what, why = f"{text}: a whole number >= 1 is expected", f"found {value!r}"
        fix = f"give {name} a whole number in the old settings, such as {default}"
        raise ConfigError(Problem(what, "the old run", why, fix))
    return int(value)


def write_group_size(recipe: Recipe, name: str) -> int:
    """Write K. Raises ConfigError for 1 where the estimator compares siblings."""
    k = take_int(recipe, name, 1)
    if k < 2 and recipe.algorithm in SIBLINGS:
        text = recipe.original_text(name) or f"{name} is 1 by default"
        what = f"{recipe.algorithm} compares completions of one prompt, and there is one"
        raise ConfigError(Problem(what, "the old run", text, f"{name} of 2 or more"))
    recipe.put("algorithm.num_generations", k, name)
    return k


def write_updates(recipe: Recipe, prompts: int, completions: int, why: str, passes: int) -> None:
    """Write P, K's mini-batches and passes. `completions`: of one update."""
    k = int(str(recipe.written_value("algorithm.num_generations", 1)))
    parts = max(1, prompts * k // completions) if completions else 1
    if completions and (prompts * k) % completions:
        recipe.notes.append(
            f"{why}: {prompts * k} completions are not a multiple of it; {parts} mini-batches"
        )
    if prompts % parts:
        more = -(-prompts // parts) * parts
        recipe.notes.append(f"{prompts} prompts cannot be split into {parts}: {more} are written")
        prompts = more
    recipe.put("train.prompts_per_step", prompts, "prompts, as there")
    recipe.put("algorithm.num_minibatches", parts, why)
    recipe.put("algorithm.num_iterations", passes, "passes over each step's completions")


def _paths(value: object) -> list[str]:
    """One path, or several in a list or behind commas, with the home folder as ~."""
    if isinstance(value, str) and "[" not in value:
        value = value.split(",")
    values = value if isinstance(value, list) else [value]
    return [str(v).strip().replace("$HOME", "~") for v in values if v]


def write_sources(recipe: Recipe, name: str, weights: object = None) -> None:
    """Write one path or several. `weights`: shares, one for each of several."""
    text, paths = recipe.original_text(name), _paths(recipe.take(name))
    if len(paths) == 1:
        recipe.put("data.path", paths[0], text)
    elif paths:
        shares = [float(w) for w in str(weights).split(",")] if weights else []
        if shares and len(shares) != len(paths):
            what = f"{len(shares)} shares for {len(paths)} data sets"
            why = f"{weights}, for {', '.join(paths)}"
            fix = "give a share for each data set in the old settings, or none"
            raise ConfigError(Problem(what, "the old run", why, fix))
        sources: list[JsonObject] = [{"path": path} for path in paths]
        for source, share in zip(sources, shares, strict=False):
            source["weight"] = share
        write_mixture(recipe, sources, text)
    else:
        recipe.notes.append("no data set is named in the old settings: set data.path")


def write_eval_sets(recipe: Recipe, name: str, split: str | None = None) -> None:
    """Write the held-out files or data sets, each a set of its own."""
    text, paths = recipe.original_text(name), _paths(recipe.take(name))
    sets: dict[str, JsonObject] = {}
    for path in paths:
        base = slug_name(Path(path).stem).replace(".", "_").replace("-", "_")
        entry = {"path": path} | ({"split": split} if split else {})
        sets[base if base not in sets else f"{base}_{len(sets) + 1}"] = entry
    if sets:
        recipe.put("eval.sets", sets, text)


def write_kl(
    recipe: Recipe, place: str, beta: float, estimator: str, why: str, whole: bool = True
) -> None:
    """Write KL. `place`: reward, loss or none; `whole`: a completion is charged for all of it."""
    recipe.put("algorithm.beta", beta if place != "none" else 0.0, why)
    if place == "none":
        return
    if place == "reward" and recipe.groups.get("algorithm", ("",))[0] == "reinforce_pp_baseline":
        recipe.notes.append(
            f"{why}: a group's mean leaves no token a KL of its own, so it is in the loss, as k2"
        )
        place, estimator = "loss", "k2"
    if place == "loss" and estimator == "k1":
        recipe.notes.append("k1 in the loss has an expected gradient of zero: k2 is written")
        estimator = "k2"
    recipe.put("algorithm.kl_in", place, why)
    recipe.put("algorithm.kl_estimator", estimator, "its estimator")
    is_to_go = place == "reward" and (recipe.algorithm in TO_GO or not whole)
    recipe.put("algorithm.kl_credit", "to_go" if is_to_go else "sequence", "who is charged for it")


def write_adapter(recipe: Recipe, rank: str, others: Mapping[str, str]) -> None:
    """Write a LoRA. `others`: name of a setting -> key of model.lora."""
    r = recipe.take(rank)
    if not r:
        for name in others:
            recipe.drop(name, "every weight is trained")
        return
    recipe.groups["lora"] = ("default", recipe.original_text(rank))
    recipe.put("model.lora.r", int(r), recipe.original_text(rank))
    values: JsonObject = {"alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}
    for name, key in others.items():
        text, value = recipe.original_text(name), recipe.take(name)
        if value is not None and key == "target_modules":
            value = value if isinstance(value, list) or value == "all-linear" else [value]
            recipe.put(f"model.lora.{key}", value, text)
        elif value is not None:
            recipe.put(f"model.lora.{key}", float(value), text)
        else:
            recipe.put(f"model.lora.{key}", values[key], "its default")


def write_engine(recipe: Recipe, engine: str, why: str, nodes: int, processes: int | None) -> None:
    """Write how many processes share the model. `processes`: of a node; None: all its GPUs."""
    if "quantization" in recipe.groups and engine in ("zero3", "fsdp2"):
        why, engine = f"{engine} there; quantised weights are whole on each process", "zero2"
    if (processes or 2) * nodes == 1:
        return
    recipe.put("distributed.engine", engine, why)
    recipe.put("distributed.num_processes", processes, "of each node; the batch is of all of them")
    if nodes > 1:
        recipe.put("distributed.num_nodes", nodes, "machines")


def write_trackers(recipe: Recipe, names: list[str], why: str) -> None:
    """Write the trackers among these names that we know, and note the others."""
    known = [n for n in names if n in ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")]
    others = [n for n in names if n not in (*known, "console", "file")]
    if known:
        recipe.put("logging.trackers", known, why)
    if others:
        recipe.notes.append(f"{', '.join(others)}: metrics.jsonl has every step")


def write_folder(recipe: Recipe, name: str) -> None:
    """Write root and name from a folder of the old run."""
    text, folder = recipe.original_text(name), recipe.take(name)
    if folder:
        path = Path(str(folder))
        recipe.put("root", str(path.parent), text)
        recipe.put("name", slug_name(path.name), text)


def finish_recipe(recipe: ForeignRecipe, tool: str, defaults: JsonObject) -> str:
    """The recipe's text, once the rules have written their parts."""
    title = tables.FOREIGN_TITLES[tool]
    recipe.unknown = put_table_rows(recipe, tool)
    for key, value in defaults.items():
        recipe.put_default(key, value, title)
    if not any(k.startswith("reward.") for k in recipe.lines) and "reward" not in recipe.groups:
        recipe.notes.append("no reward is named in the old settings: add reward=NAME")
    k, p = (recipe.lines[n][0] for n in ("algorithm.num_generations", "train.prompts_per_step"))
    recipe.title = f"Migrated from {title}: {p} prompts of {k} completions per step."
    return recipe.render()
