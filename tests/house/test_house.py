"""The shape of the house (CONTRIBUTING.md): imports only go down, nothing outgrows its room."""

import ast
import importlib
import re
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import words
from cli_cases import Rloo
from hatchling.build import build_editable

from rloo_cli.cli.config import schema_fields
from rloo_cli.config import check, messages, registry
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils import paths

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rloo_cli"
# Each room may import what stands in it and before it; rooms in one line do not import each other.
ROOMS = [
    "utils", "config", "data", "policy rewards algorithms", "distributed", "generation",
    "agents", "reporting planning", "run.py", "evaluation checkpoint", "train", "launch",
    "api.py plugin.py", "inspection compat", "cli __main__.py",
]  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms.split()}
ROOT_FILES = {"__init__.py", "__main__.py", "api.py", "run.py", "plugin.py"}
# May name modules above them as strings: plug-ins, what is made, what a file of yours imports.
TABLES = {"config/registry.py", "config/synthetic.py"}
LINES = {
    "train/loop.py": 120,
    "algorithms/rloo.py": 150,
    "config/schema.py": 720,  # every key that does not belong to a plug-in stands in one file
}
LONGEST_LOOP = 710
FILES = {str(p.relative_to(PACKAGE)): p for p in sorted(PACKAGE.rglob("*.py"))}
TREES = words.package_trees()
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
LONGEST_FILE, LONGEST_FUNCTION, SHORTEST_FILE = 600, 50, 40
MOST_WHOLE_CONFIGS = 108  # functions that take the whole RunConfig; it only goes down
# Short files that are neither plug-ins nor protocols nor entry points, and why they stay.
SHORT = {
    "generation/common/pacing.py": "the proof of carry's bound, for the planner too, without torch",
}
ENTRIES = {"cli/key_values.py", "generation/vllm/plugin.py", "plugin.py"}  # named by other programs
PLUGINS = ("agents/", "algorithms/", "rewards/", "generation/", "generation/vllm/receive/")


def room(file: str) -> str:
    return file.partition("/")[0]


def above(name: str, other: str) -> bool:
    """Whether a file of one room may not import that other file."""
    mine, theirs = room(name), room(other)
    if other == "__init__.py" or mine == theirs or name in ("__init__.py", "__main__.py"):
        return False
    return LEVEL[theirs] >= LEVEL[mine]


def imported(node: ast.AST) -> Iterator[str]:
    """The files of the package that one import statement names."""
    dotted = []
    if isinstance(node, ast.Import):
        dotted = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are written out in full"
        dotted = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in dotted:
        parts = name.split(".")
        if parts[0] == "rloo_cli":
            while parts:
                inner = "/".join(parts[1:])
                here = [
                    f for f in (f"{inner}.py", f"{inner}/__init__.py".lstrip("/")) if f in FILES
                ]
                if here:
                    yield here[0]
                    break
                parts.pop()


def for_types(tree: ast.Module) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING:`."""
    ifs = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    return {inner for node in ifs for inner in ast.walk(node)}


def definitions(tree: ast.Module) -> Iterator[DEFINITIONS]:
    yield from (n for n in ast.walk(tree) if isinstance(n, DEFINITIONS))


def takes_whole_config(node: DEFINITIONS) -> bool:
    """Whether RunConfig is in the annotation of a parameter."""
    if isinstance(node, ast.ClassDef):
        return False
    of = node.args
    given = [*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg]
    return any("RunConfig" in ast.unparse(a.annotation) for a in given if a and a.annotation)


def length(node: DEFINITIONS) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def test_imports_only_go_down() -> None:
    """At runtime and for types alike."""
    upward = [
        f"{name}:{node.lineno} imports {other}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        for other in imported(node)
        if above(name, other)
    ]
    assert not upward


def test_no_string_names_a_module_above_but_in_two_tables() -> None:
    naming = {
        (name, other)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for other in named(node.value)
        if above(name, other)
    }
    assert {name for name, _ in naming} <= TABLES, naming


def named(text: str) -> Iterator[str]:
    """The files of the package that a string names: `rloo_cli.a.b:c`, or an import in a program."""
    for module in re.findall(r"\brloo_cli((?:\.\w+)+)", text):
        parts = module.split(".")[1:]
        while parts:
            inner = "/".join(parts)
            here = [f for f in (f"{inner}.py", f"{inner}/__init__.py") if f in FILES]
            if here:
                yield here[0]
                break
            parts.pop()


def test_every_room_has_its_place_and_the_root_holds_five_files() -> None:
    files = {name for name in FILES if "/" not in name}
    assert files == ROOT_FILES
    assert {room(name) for name in FILES} - {"__init__.py"} == set(LEVEL)


def test_no_module_imports_itself_in_a_circle() -> None:
    """For types too: what two files know of each other belongs into a third."""
    graph = {
        name: {other for node in ast.walk(tree) for other in imported(node)} - {name}
        for name, tree in TREES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_an_import_inside_a_function_says_why() -> None:
    silent = []
    for name, tree in TREES.items():
        lines = FILES[name].read_text().splitlines()
        for function in definitions(tree):
            for node in ast.walk(function):
                if [*imported(node)] and "# lazy: " not in lines[node.lineno - 1]:
                    silent.append(f"{name}:{node.lineno}, in {function.name}")
    assert not silent


def test_a_room_lists_its_files() -> None:
    """Each package says in its docstring what lies in it, a line for each."""
    silent = []
    for name in FILES:
        folder = name.removesuffix("__init__.py")
        if not name.endswith("/__init__.py") or folder in ("algorithms/", "rewards/"):
            continue
        said = ast.get_docstring(TREES[name]) or ""
        beside = {n.removeprefix(folder).partition("/")[0] for n in FILES if n.startswith(folder)}
        beside -= {"__init__.py"}
        for one in beside:
            listed = re.findall(rf"^ *{re.escape(one.removesuffix('.py'))}/? ", said, re.MULTILINE)
            silent += [f"{folder}{one}"] * (len(listed) != 1)
    assert not silent


def test_every_room_says_what_it_is() -> None:
    """A folder without an __init__.py is a package, too, that no rule of this file would see."""
    assert not {str(p.parent) for p in FILES.values()} - {
        str(p.parent) for name, p in FILES.items() if name.endswith("__init__.py")
    }


def test_the_picture_of_the_house_is_of_the_house() -> None:
    drawn = importlib.import_module("draw_house")
    assert drawn.PICTURE.read_text() == drawn.picture(), "make house"


def test_no_file_outgrows_its_room() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert not {n: count for n, count in lines.items() if count > LINES.get(n, LONGEST_FILE)}


def test_no_file_is_a_scrap() -> None:
    """A short file is a plug-in, something that another program names, or one of four."""
    short = {
        name
        for name, path in FILES.items()
        if len(path.read_text().splitlines()) < SHORTEST_FILE
        and Path(name).name not in ("__init__.py", "__main__.py")
        and f"{Path(name).parent}/" not in PLUGINS
    }
    assert short - ENTRIES == set(SHORT) and len(SHORT) <= 4


def test_the_loop_and_what_it_calls_in_its_room_are_an_evening_s_reading() -> None:
    def called(name: str, node: ast.AST) -> Iterator[tuple[str, str]]:
        """(file, function) of the room that a piece of this file names."""
        modules = {
            (alias.asname or alias.name): (file, alias.name)
            for n in ast.walk(TREES[name])
            if isinstance(n, ast.ImportFrom)
            for file, alias in zip(imported(n), n.names, strict=False)
            if file.startswith("train/")
        }
        for n in ast.walk(node):
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name):
                if n.value.id in modules:
                    yield modules[n.value.id][0], n.attr
            elif isinstance(n, ast.Name):
                yield modules.get(n.id, (name, n.id))

    pending, seen = [*called("train/loop.py", TREES["train/loop.py"])], set()
    lines = len(FILES["train/loop.py"].read_text().splitlines())
    while pending:
        file, wanted = pending.pop()
        for node in TREES[file].body:
            if isinstance(node, DEFINITIONS) and node.name == wanted and (file, wanted) not in seen:
                seen.add((file, wanted))
                lines += 0 if file == "train/loop.py" else length(node)
                pending += called(file, node)
    assert 400 < lines <= LONGEST_LOOP, lines


def test_functions_fit_a_screen() -> None:
    long = [
        f"{name}: {node.name} has {length(node)} lines"
        for name, tree in TREES.items()
        for node in definitions(tree)
        if not isinstance(node, ast.ClassDef) and length(node) > LONGEST_FUNCTION
    ]
    assert not long


def test_parts_take_their_sections_and_not_the_whole_config() -> None:
    """Few functions have the whole RunConfig among their parameters (HOUSE 6)."""
    whole = [
        f"{name}: {node.name}"
        for name, tree in TREES.items()
        for node in definitions(tree)
        if takes_whole_config(node)
    ]
    assert len(whole) <= MOST_WHOLE_CONFIGS, whole


def test_every_error_says_what_where_why_and_how_to_mend_it() -> None:
    """As far as the code shows it: an argument that is left out, or "" as it stands there."""
    lacking = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if name == "utils/errors.py" or not isinstance(node, ast.Call):
                continue  # errors.py makes one of a bare text
            if isinstance(node.func, ast.Name) and node.func.id == "Problem":
                given = dict(zip(("what", "where", "why", "fix"), node.args, strict=False))
                given |= {k.arg: k.value for k in node.keywords if k.arg}
                if any(k.arg is None for k in node.keywords):
                    continue  # one that another process has sent
                empty = [k for k, v in given.items() if isinstance(v, ast.Constant) and not v.value]
                whole = {"what", "where", "why", "fix"} <= given.keys() - set(empty)
                lacking += [] if whole else [f"{name}:{node.lineno}: {ast.unparse(node)[:80]}"]
    assert not lacking


def test_names_of_public_functions_say_what_they_do_to_what() -> None:
    names = [name for _, name in words.public_functions()]
    assert sum(map(words.one_word, names)) < words.MOST * len(names)
    assert not words.taken_twice(), "make words"


def test_the_glossary_names_what_is_there() -> None:
    """Its last column: a file or a folder, or a name that the package defines."""
    defined = {node.name for tree in TREES.values() for node in definitions(tree)}
    defined |= {
        node.target.id
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    gone = []
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        cells = line.strip("|").split("|")
        for name in re.findall(r"`([\w./]+)`", cells[-1]) if line.startswith("| ") else ():
            path = name.replace(".", "/").removesuffix("/py").strip("/")
            here = {f"{path}.py", f"{path}/__init__.py"} & FILES.keys() or (ROOT / path).is_dir()
            gone += [] if here or name.rpartition(".")[2] in defined else [name]
    assert not gone


# Docstrings that explain with a colon what is not a parameter of theirs.
EXPLAINED = {
    "close", "keep_streams", "keys", "latest", "raise_if_stopped", "seconds", "after", "weights",
    "why_not_ids", "write_error",
}  # fmt: skip


def test_a_docstring_explains_parameters_that_there_are() -> None:
    """`name`: ... in a docstring is a parameter of that function, or of the class's __init__."""
    wrong = []
    for file, tree in TREES.items():
        for node in definitions(tree):
            body = node.body if isinstance(node, ast.ClassDef) else [node]
            makers = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            maker = next((n for n in makers if n.name == "__init__" or n is node), None)
            if maker is None:
                continue
            a = maker.args
            given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, [a.vararg, a.kwarg])]
            named = re.findall(r"`(\w+)`:", ast.get_docstring(node) or "")
            unknown = {*named} - {arg.arg for arg in given} - EXPLAINED
            wrong += [f"{file}: {node.name} explains {name}" for name in sorted(unknown)]
    assert not wrong


def test_a_file_says_what_it_is_for() -> None:
    silent = [
        name
        for name, tree in TREES.items()
        if FILES[name].read_text().strip() and not ast.get_docstring(tree)
    ]
    assert not silent


def used_elsewhere() -> Iterator[tuple[str, str]]:
    """(file, name) of everything that another file of the package uses."""
    for name, tree in TREES.items():
        nodes = [*ast.walk(tree)]
        asked: dict[str, set[str]] = {}  # of each name, the attributes that are read
        for n in nodes:
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name):
                asked.setdefault(n.value.id, set()).add(n.attr)
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rloo_cli"):
                for file, alias in zip(imported(node), node.names, strict=True):
                    if file != name:
                        yield file, alias.name
                    called = asked.get(alias.asname or alias.name, set())
                    yield from ((file, attribute) for attribute in called)


def test_what_one_file_uses_of_another_has_a_docstring() -> None:
    silent = set()
    for file, name in used_elsewhere():
        for node in TREES[file].body:
            if isinstance(node, DEFINITIONS) and node.name == name and not name.endswith("Config"):
                silent |= set() if ast.get_docstring(node) else {f"{file}: {name}"}
    assert not silent


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda p: p.stem)
def test_a_recipe_fits_on_one_screen_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 30
    assert lines[0].startswith("# ") and lines[0].endswith(".")


@pytest.mark.parametrize("folder", ["conf", "recipes"])
def test_no_yaml_of_ours_names_a_python_object(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.yaml"):
        assert "_target_" not in path.read_text(), path


# What the YAML builds: every recipe, every choice of a group, every key.

RECIPES = sorted(paths.recipe_files())
GROUPS = {
    (group, choice)
    for group, choices in paths.group_choices([]).items()
    for choice in choices
    if group not in ("recipe", "debug")
}


def built(words: list[str], code: Path) -> RunConfig:
    """Compose and check; a key left open (???) gets something of its kind."""
    composed = compose_config(words)
    open_keys = [k for k, v in messages.walk_values(composed.values) if v == "???"]
    for key in open_keys:
        section, _, name = key.rpartition(".")
        a_path = {"model": "make:tiny", "data": "make:tiny", "reward.function": f"{code}:score"}
        value = a_path.get(section, "make:tiny_reward") if name == "path" else "word"
        words = [*words, f"{key}={value}"]
    return check.check_config(compose_config(words) if open_keys else composed)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    return path


@pytest.mark.wide
@pytest.mark.parametrize("debug", [[], ["+debug=cpu"]], ids=["plain", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_builds(recipe: str, debug: list[str], code: Path) -> None:
    run = built([f"+recipe={recipe}", *debug], code)
    assert run.name == recipe.replace("/", "-")
    if debug:
        assert run.max_steps == 2 and run.root == "runs/debug"
        assert run.model.path.startswith("make:") and run.data.path.startswith("make:")


@pytest.mark.wide
@pytest.mark.parametrize(("group", "choice"), sorted(GROUPS))
def test_every_choice_of_a_group_builds(group: str, choice: str, code: Path) -> None:
    words = ["+recipe=smoke", f"{group}={choice}", "data.max_prompt_length=32"]
    chosen = {"code_tests": ["reward.code_tests.sandbox=bwrap"]}  # it is refused without one
    chosen |= {bits: ["lora=default"] for bits in ("4bit", "8bit")}  # and these without an adapter
    game = "agent.environments={game: rloo_cli.data.synthetic.tool_tasks:GuessingGame}"
    chosen["class"], chosen["environment"] = [game], ["agent=class", game]
    chosen["tools"] = ["agent.tools=[rloo_cli.data.synthetic.tool_tasks:multiply]"]
    chosen["opd"] = chosen["gkd"] = ["model.ref_path=make:tiny"]  # a teacher
    chosen["proxy"] = ["agent.command=python agent.py"]
    chosen["rollout"] = ["agent.rollout=rloo_cli.data.synthetic.tool_tasks:multiply"]
    built([*words, *chosen.get(choice, [])], code)


@pytest.mark.parametrize("room", registry.REGISTRIES)
def test_what_the_registry_offers_has_yaml_a_line_of_documentation_and_a_test(room: str) -> None:
    group, key = {
        "rewards": ("reward", "type"),
        "algorithms": ("algorithm", "name"),
        "generation": ("generation", "backend"),
        "agents": ("agent", "kind"),
    }[room]
    yaml = "\n".join(p.read_text() for p in (paths.CONF / group).glob("*.yaml"))
    house = Path(__file__).name
    tests = "\n".join(
        p.read_text() for p in Path(__file__).parents[1].rglob("*.py") if p.name != house
    )
    for name in registry.registry_names(room):
        assert re.search(rf"^ *{key}: {name}$", yaml, re.MULTILINE), f"{name} has no YAML"
        assert registry.registered_module(room, name).__doc__, f"{name} does not say what it is"
        assert re.search(rf"\b{name}\b", tests), f"{name} has no test"


def test_every_key_of_conf_is_in_the_schema_and_has_a_meaning() -> None:
    rewards = ",".join(registry.registry_names("rewards"))
    composed = compose_config(
        ["+recipe=smoke", f"reward=[{rewards}]", "algorithm.overlong_penalty=null"]
    )
    values = check.merge_defaults(composed.values)
    known = messages.schema_keys(check.run_config_class(values))
    leaves = {k for k, v in messages.walk_values(values) if not isinstance(v, dict)}
    assert leaves <= set(known)
    sections = {key.rpartition(".")[0] for key in known}
    for key, meaning in known.items():
        assert meaning or key in sections, f"{key} has no meaning"
        assert not meaning.endswith((".", " ")), key


def test_every_key_has_its_value_in_yaml_not_in_the_schema() -> None:
    rewards = {name: {"type": name} for name in registry.registry_names("rewards")}
    values = check.merge_defaults(compose_config(["+recipe=smoke"]).values | {"reward": rewards})
    for key, field in schema_fields(check.run_config_class(values)).items():
        assert field.is_required(), f"{key} has a default in Python"


# No torch: an answer in half a second, and nothing loaded for a config that is refused.

# One of each kind; tests/config/test_refusals_config.py has hundreds, in one process without torch.
REFUSED = [
    ["algorithm.num_generation=4"],
    ["reward=function", "reward.function.path=nothing.py:score"],
    ["distributed.accelerate_config=nothing.yaml"],
]


@pytest.mark.slow_cases("reward=function reward.function.path=nothing.py:score")
@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_refused_config_imports_no_torch(words: list[str], rloo_without_torch: Rloo) -> None:
    ended = rloo_without_torch("train", "+recipe=smoke", *words)
    assert ended.code == 2, ended.said
    assert "Traceback" not in ended.said and ended.err.startswith("error: ")
    assert rloo_without_torch.left() == []


@pytest.mark.slow_but("--help", "config --json", "train +recipe=smoke --cfg job")
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["recipes"],
        ["config"],
        ["config", "--json"],
        ["config", "explain", "algorithm.beta"],
        ["completion", "query", "train", "alg"],
        ["train", "+recipe=smoke", "--cfg", "job"],
        ["train", "+recipe=tldr_1b", "--dry-run"],
    ],
    ids=" ".join,
)
def test_what_only_reads_configs_imports_no_torch(
    words: list[str], rloo_without_torch: Rloo
) -> None:
    ended = rloo_without_torch(*words)
    assert ended.code == 0, ended.said
    assert ended.out and rloo_without_torch.left() == []


def test_torch_is_missed_where_it_is_forbidden_and_needed(rloo_without_torch: Rloo) -> None:
    ended = rloo_without_torch("train", "+recipe=smoke")
    assert ended.code == 1 and "was imported" in ended.err


def test_the_checkout_can_be_installed_as_make_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install, and of it the part that this project's own settings can break."""
    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / build_editable(str(tmp_path)))
    (path_file,) = (name for name in wheel.namelist() if name.endswith(".pth"))
    assert wheel.read(path_file).decode() == str(ROOT)
