"""Writes an old run's data, rewards, tools and folders, if no single key corresponds.

A setting with just another name is in `config/old_names.txt`, one whose value changes with it
in `table.py`.
"""

import re
from pathlib import Path
from typing import get_args

from rloo_cli.compat.migrate.recipe import Recipe, old_run_error, schema_refusal
from rloo_cli.compat.migrate.scripts import BUILT_IN, TLDR_DATASET, TLDR_TEMPLATES
from rloo_cli.config.key_types import TrackerName
from rloo_cli.utils.files import JsonObject

NULL_NOTE = "here null is what the context leaves, at most 4096"
REWARD_MODELS = ("reward_model_path", "reward_model_name_or_path", "reward_model")
AGENTS = {  # a setting of the old trainer -> the kind of agent, and its key
    "rollout_func": ("rollout", "agent.rollout"),
    "environment_factory": ("class", "agent.environments"),
    "tools": ("tools", "agent.tools"),
}
LENGTH_OF_ALL = (
    "TRL's max_completion_length was for the whole conversation, tools included; here it is per"
    " turn: generation.max_completion_length; agent.max_episode_tokens limits the whole"
)
ROLLOUT_FUNCTION = (
    "its second argument is a sampler here, not the trainer: sampler.sample(ids) replaces its own"
    " generation; and agent.fields=[...] names its fields for rewards (docs/agents.md)"
)


def take_built_in(recipe: Recipe, script: str) -> None:
    """Add the settings hard-coded in a script of TRL's; `script`: its path."""
    if (describe := BUILT_IN.get(Path(script).name)) is None:
        return
    built_in = describe(script)
    for key, value in built_in.keys.items():
        recipe.put(key, value, f"{script} had it built in")
    if "data.path" in built_in.keys:
        recipe.drop(["dataset_name"], f"{script} trains on data of its own")
    names = ", ".join([*built_in.flags, *built_in.keys])
    recipe.notes += [*built_in.notes, f"{script} had these built in: {names}"]
    recipe.add_flags(built_in.flags)


def write_data(recipe: Recipe, script: str) -> None:
    """Write where the prompts come from, and how long ones are handled."""
    name = "dataset" if "dataset" in recipe.flags else "datasets"
    text = recipe.original_text(name)
    sources = [_dataset_source(entry) for entry in recipe.take_list(name) if entry]
    if len(sources) > 1:
        _write_mixture(recipe, sources, text)
    elif sources:
        for key, value in sources[0].items():
            note = "; its n rows were drawn at random" if key == "max_samples" else ""
            recipe.put(f"data.{key}", value, text + note)
    if "_tldr" in script and recipe.dialect.is_old_trl:
        why = f"{Path(script).name} had it built in"
        if not recipe.flags.get("dataset_name"):
            recipe.put("data.path", TLDR_DATASET, why)
        recipe.put("data.template", TLDR_TEMPLATES[recipe.dialect.title], why)
        recipe.put("data.max_prompt_length", 512, f"{why}: longer ones were left out")
    _write_prompt_limit(recipe)
    if sets := recipe.take("eval_sets"):  # of a trainer that is called from Python
        recipe.put("eval.sets", sets, "eval_dataset")
    if str(recipe.flags.get("system") or "").endswith(".txt"):  # ms-swift takes a file here
        recipe.drop(["system"], "a file: set data.system to its text")


def _dataset_source(entry: object) -> JsonObject:
    """`path:subset#n`, or an entry of TRL's `datasets`, under the keys of our SourceConfig."""
    if isinstance(entry, dict):
        source: JsonObject = {k: entry.get(k) for k in ("path", "name", "split")}
    else:
        path, _, samples = str(entry).partition("#")
        path, _, subset = path.partition(":")
        source = {"path": path, "name": subset or None}
        source["max_samples"] = int(samples) if samples.isdigit() else None
    return {k: v for k, v in source.items() if v is not None}


def _write_mixture(recipe: Recipe, sources: list[JsonObject], text: str) -> None:
    """Write several data sets as data.mixture, each with its rows as its weight, if given."""
    table: JsonObject = {}
    for source in sources:
        name = re.sub(r"[-.]", "_", slug_name(Path(str(source["path"])).stem))
        name = name if name not in table else f"{name}_{len(table) + 1}"
        table[name] = {"weight": float(source.get("max_samples") or 1)} | source
    recipe.put("data.mixture", table, text)
    recipe.put("data.path", None, "data.mixture says where the rows come from")
    if any("max_samples" not in source for source in sources):
        recipe.notes.append(
            f"{text}: the old tool put the data sets one after the other, so that each counted by"
            " its rows; data.mixture draws by weight: set the weights to the numbers of rows"
        )


def _write_prompt_limit(recipe: Recipe) -> None:
    """Write how long a prompt may be, and how longer ones are handled."""
    key, dialect = "data.max_prompt_length", recipe.dialect
    if recipe.flags.get("max_prompt_length") or dialect.prompt_limit:
        said = recipe.take_whole_number("max_prompt_length")
        why = recipe.original_text("max_prompt_length") if said else f"{dialect.title}'s default"
        recipe.put(key, said or dialect.prompt_limit, why)
        recipe.put("data.overlong", "truncate_left", "TRL kept the last tokens")
    elif not dialect.is_swift and key not in recipe.lines:
        why = "it kept the last 512 tokens up to 0.26; " if not dialect.is_old_trl else ""
        recipe.put(key, None, f"{dialect.title} has no limit; {why}{NULL_NOTE}")


def write_rewards(recipe: Recipe) -> None:
    """Write `reward_funcs`, reward models and their weights as one named entry each."""
    rewards: list[tuple[str, JsonObject, str]] = []  # name, {type, path}, its text in the old run
    for flag in REWARD_MODELS:
        paths = recipe.take_list(flag)
        for path in paths:
            name = _own_name(str(path)) if len(paths) > 1 else "reward_model"
            rewards.append((name, {"type": "model", "path": path}, recipe.original_text(flag)))
    plugins = recipe.flags.get("external_plugins") or "rewards.py"
    recipe.drop(["external_plugins"], "rewards that are code are functions in it, by file.py:name")
    plugin = str(plugins[0] if isinstance(plugins, list) else plugins)
    functions = [str(spec) for spec in recipe.take_list("reward_funcs")]
    named = [(*_reward_entry(recipe, spec, plugin), recipe.original_text("reward_funcs"))
             for spec in functions]  # fmt: skip
    for spec, (_, entry, _) in zip(functions, named, strict=True):
        if entry.get("path") == f"{plugin}:{spec}":
            recipe.notes.append(f"reward {spec} is code: make it a function {plugin}:{spec}")
    rewards = [*named, *rewards] if recipe.dialect.is_swift else [*rewards, *named]
    weights = recipe.take_list("reward_weights")
    if weights and len(weights) != len(rewards):
        count = f"{len(weights)} weights, {len(rewards)} rewards: {[name for name, *_ in rewards]}"
        fix = "give reward_weights a number for each reward, or leave it out"
        raise old_run_error("reward_weights does not fit the rewards", count, fix)
    tokenizers = recipe.take_list("reward_tokenizers")  # of a trainer called from Python
    for (_, entry, _), tokenizer in zip(rewards, tokenizers, strict=False):
        entry |= {"tokenizer": tokenizer} if tokenizer else {}
    taken: set[str] = set()
    for index, (name, entry, why) in enumerate(rewards):
        name = name if name not in taken else f"{name}_{index + 1}"
        taken.add(name)
        weight = float(weights[index]) if weights else 1.0
        recipe.put_reward(name, entry, why)
        if weights and schema_refusal(f"reward.{name}.type", entry["type"]) is None:
            recipe.put(f"reward.{name}.weight", weight, recipe.original_text("reward_weights"))
    if recipe.take("environment_reward"):  # TRL adds it with the weight 1
        recipe.put_reward("environment", {"type": "environment"}, "the environment's get_reward")
    elif not rewards:
        recipe.notes.append("no reward is named in the old settings: add reward=NAME")


def _reward_entry(recipe: Recipe, spec: str, plugin: str) -> tuple[str, JsonObject]:
    """The name and the entry here of a reward, from its old name; `plugin` has its code."""
    short = spec.rpartition(".")[2] if spec.startswith("trl.") else spec
    if short in recipe.dialect.rewards:
        name = recipe.dialect.rewards[short]
        return name, {"type": name}
    if ":" in spec:
        return spec.rpartition(":")[2], {"type": "function", "path": spec}
    if "/" in spec and not spec.endswith(".py"):
        return _own_name(spec), {"type": "model", "path": spec}
    where, _, name = spec.rpartition(".")
    return name, {"type": "function", "path": f"{where or plugin}:{name}"}


def _own_name(path: str) -> str:
    """The name of a reward that is a model."""
    return re.sub(r"\W+|^(?=\d)", "_", Path(path).name)


def write_agent(recipe: Recipe) -> None:
    """Write the agent for an old run's tools, environments or rollout function.

    They are code in the training script, which the recipe names as file.py:name.
    """
    given = {name: recipe.take(name) for name in AGENTS}
    name = next((n for n, value in given.items() if value), None)
    turns = "max_tool_calling_iterations"
    if name is None:
        recipe.drop([turns], "this recipe has no tools")
        return
    kind, key = AGENTS[name]
    recipe.groups["agent"] = (kind, name)
    recipe.put(key, given[name], name)
    if name == "rollout_func":
        recipe.notes.append(f"{given[name]}: {ROLLOUT_FUNCTION}")
    elif given["tools"] and name != "tools":
        names = ", ".join(map(str, given["tools"]))
        what = "an environment's tools are its methods here: make these methods of it"
        recipe.notes.append(f"tools={names}: {what}")
    iterations = recipe.take_whole_number(turns)
    if iterations is None:
        recipe.notes.append(f"TRL sets no limit to the turns without {turns}; here it is"
                            " agent.max_turns")  # fmt: skip
    else:
        why = f"{recipe.original_text(turns)} + 1: the last turn is counted, too"
        recipe.put("agent.max_turns", iterations + 1, why)
    recipe.notes.append(LENGTH_OF_ALL)


def write_run_settings(recipe: Recipe) -> None:
    """Write names and folders, the optimizer and the trackers."""
    runs = [name for name in ("run_name", "exp_name") if recipe.flags.get(name)]
    if folder := recipe.take("output_dir"):
        path, text = Path(str(folder)), recipe.original_text("output_dir")
        recipe.put("root", str(path.parent), text)
        recipe.put("name", slug_name(path.name), text)
        recipe.drop(runs, "output_dir names the run")
    elif runs:
        why = f"{recipe.original_text(runs[0])}; no time stamp is added"
        recipe.put("name", slug_name(str(recipe.take(runs[0]))), why)
    kind, text = str(recipe.take("optim", "")), recipe.original_text("optim")
    if kind in ("adamw", "adamw_hf") or kind.startswith("adamw_torch"):
        recipe.put("train.optimizer", "adamw", text)
    elif kind:
        recipe.unsupported.append(f"train.optimizer: {kind}  ({text})")
    adam = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    if said := [name for name in adam if name in recipe.flags]:
        *betas, eps = (recipe.take_number(name, default) for name, default in adam.items())
        recipe.put("train.optimizer_kwargs", {"betas": betas, "eps": eps}, ", ".join(said))
    _write_trackers(recipe)


def _write_trackers(recipe: Recipe) -> None:
    """Write logging.trackers from report_to: one name or several, `all` or `none`."""
    text, given = recipe.original_text("report_to"), recipe.take_list("report_to")
    names = [str(name) for name in given if name and name != "none"]
    if not names and "report_to" in recipe.original_flags:
        recipe.dropped.append(f"{text}: off, as here")
    known = [name for name in names if name in get_args(TrackerName)]
    if known:
        recipe.put("logging.trackers", known, text)
    for name in [n for n in names if n not in known]:
        why = f"trackers are {', '.join(get_args(TrackerName))}, each by its name"
        recipe.dropped.append(f"report_to {name}: {why}; metrics.jsonl has every step")


def slug_name(name: str) -> str:
    """A name for a folder or an entry: characters except letters, digits and ._+- become dashes."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-._+") or "run"
