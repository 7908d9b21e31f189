"""What the pages show is so: their Python runs, their commands compose, what they name is there.

A page's Python blocks run one after the other in one namespace, in a folder that holds the files
which pages show (blocks that begin with `# name.py` or `# name.yaml`). A command is composed and
checked as `rloo` would, not run; one that is followed by `error:` must be refused in those words.
"""

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from loop_cases import cache

from rloo_cli.cli import main
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.rewards.engine.arguments import REWARD_KWARGS
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = {p.name: p for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
PAGES |= {name: ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md")}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash", "sh", "console")
COMPOSES = ("train", "sweep", "eval", "plan", "fetch", "sft", "reward-model", "vllm-serve")
NO_VALUE = ("--dry-run", "--multirun", "-m", "--json", "--no-wait")  # of those verbs' flags


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    line: int
    text: str
    said: str  # the line after it

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def blocks(page: Path) -> Iterator[tuple[str, str, int]]:
    """Language, text and line of each fenced block."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        yield found[1], found[2], text[: found.start(2)].count("\n") + 1


def commands(page: Path) -> Iterator[Command]:
    """The lines of shell blocks, without a prompt's $, a comment, or what stands 2 spaces on."""
    for language, text, start in blocks(page):
        if language not in SHELL:
            continue
        lines = text.splitlines()
        for n, line in enumerate(lines):
            while line.endswith("\\") and n + 1 < len(lines):
                n, line = n + 1, line[:-1].rstrip() + " " + lines[n + 1].strip()
            plain = re.split(r"\s{2,}|\s#\s", line.strip().removeprefix("$ "))[0]
            yield Command(start + n, plain, lines[n + 1] if n + 1 < len(lines) else "")


def shown_files(folder: Path, *pages: Path) -> None:
    """Write the files that pages (or all) show: they begin with `# name.py` or `# name.yaml`."""
    for page in pages or PAGES.values():
        for _, text, _ in blocks(page):
            if named := re.match(r"# ([\w/]+\.(?:py|yaml))\b", text):
                path = folder / named[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the reader's own, and no network."""
    shown_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in (("RLOO_CACHE", cache()), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    return tmp_path


def with_python() -> list[str]:
    return [name for name, page in PAGES.items() if any(b[0] == "python" for b in blocks(page))]


@pytest.mark.wide
@pytest.mark.parametrize("name", with_python())
def test_the_python_of_a_page_runs(name: str, root: Path) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    for language, text, line in blocks(PAGES[name]):
        if language == "python":
            code = "\n" * (line - 1) + text  # so that a traceback names the page's own line
            exec(compile(code, str(PAGES[name]), "exec"), namespace)


def jobs(verb: str, words: list[str]) -> Iterator[list[str]]:
    """What is composed for a command: one list of words, or one per job of a sweep."""
    sweep = verb == "sweep" or {"--multirun", "-m"} & {*words}
    kept, given = [], iter(words)
    for word in given:
        if word.startswith("-") and not word.startswith("--config-dir"):
            if word not in NO_VALUE and "=" not in word:
                next(given)  # its value
            continue
        kept.append(word)
        if word == "--config-dir":
            kept.append(next(given))
    if not sweep:
        yield kept
        return
    choices = [[w] if "[" in w or "=" not in w else alternatives(w) for w in kept]
    yield from (list(job) for job in itertools.product(*choices) if not hydra(job))


def alternatives(word: str) -> list[str]:
    key, _, values = word.partition("=")
    return [f"{key}={value}" for value in values.split(",")]


def hydra(job: tuple[str, ...]) -> bool:
    return any(word.startswith("hydra/") for word in job)


def subject(verb: str, words: list[str]) -> list[str]:
    """A run's name or folder -> the recipe of that name, or the page's own."""
    bare = [w for w in words if "=" not in w and not w.startswith(("+", "-"))]
    if verb not in ("eval", "fetch") or not bare:
        return words
    name = bare[0].removeprefix("runs/").partition("/")[0]
    recipe = name if name in paths.recipe_files() else "my.yaml"
    return [f"+recipe={recipe}", *(w for w in words if w != bare[0])]


def of_rloo(name: str) -> list[Command]:
    return [c for c in commands(PAGES[name]) if c.text.startswith("rloo ")]


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in PAGES if of_rloo(name)])
def test_the_commands_of_a_page_compose_and_pass_the_check(name: str, root: Path) -> None:
    for command in of_rloo(name):
        verb, *words = command.words[1:]
        assert verb in main.VERBS, f"{name}:{command.line}: {command.text}"
        if words[:1] == ["explain"]:
            verb, words = "train", words[2:]
        if verb not in COMPOSES or (verb == "sweep" and not words[0].startswith("+")):
            continue  # `rloo sweep stop NAME` and its like compose nothing
        for job in jobs(verb, subject(verb, words)):
            try:
                check.check_config(compose_config(job))
            except ConfigError as error:
                first = str(error.render()).splitlines()[0]
                assert command.said == first, f"{name}:{command.line}: {error.render()}"
            else:
                assert not command.said.startswith("error:"), f"{name}:{command.line}: no error"


@pytest.mark.parametrize("name", PAGES)
def test_scripts_and_targets_that_a_page_names_are_there(name: str) -> None:
    text = PAGES[name].read_text()
    for script, flags in re.findall(r"python ((?:bench|tests)/[\w/]+\.py)([^`\n]*)", text):
        source = (ROOT / script).read_text()
        for flag in re.findall(r"--[\w-]+", flags):
            assert flag in source, f"{name}: {script} has no {flag}"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = [c.text.split()[1] for c in commands(PAGES[name]) if c.text.startswith("make ")]
    for target in [*re.findall(r"`make ([\w-]+)`", text), *shown]:
        assert target in targets, f"{name}: make {target}"


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_or_links_are_there(name: str) -> None:
    page = PAGES[name]
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), f"{name}: {link}"
    for path in re.findall(r"`((?:tests|bench|docs|rloo_cli|scripts)/[\w/]+\.\w+)`", text):
        assert "NAME" in path or (ROOT / path).exists(), f"{name}: {path}"


# docs/algorithms.md and docs/results/objectives.md: their numbers are those of the vectors.

VECTORS = json.loads((ROOT / "tests/algorithms/vectors.json").read_text())
OBJECTIVES = [ROOT / "docs" / name for name in ("algorithms.md", "results/objectives.md")]


def table_rows(page: Path) -> list[list[str]]:
    """The cells of every line of a table."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbers(text: str) -> list[float]:
    """Those with a decimal point, outside of formulas."""
    return [float(n) for n in re.findall(r"-?\d+\.\d+", re.sub(r"\$[^$]*\$", "", text))]


def leaves(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, int | float):
        yield float(value)


def test_numbers_in_tables_of_objectives_are_those_of_the_vectors_or_of_the_yaml() -> None:
    values = [*leaves(VECTORS)]
    for path in (paths.CONF / "algorithm").rglob("*.yaml"):
        values += leaves(yaml.safe_load(path.read_text()))
    known = {round(x, 6) for x in values} | {0.22, 1.16}  # and two releases of TRL
    rows = [row for page in OBJECTIVES for row in table_rows(page)]
    shown = [n for row in rows for cell in row for n in numbers(cell)]
    assert len(shown) > 150
    wrong = [n for n in shown if round(n, 6) not in known]
    assert not wrong


def named_rows() -> dict[str, list[str]]:
    return {row[0].strip("`"): row[1:] for row in table_rows(OBJECTIVES[1])}


@pytest.mark.parametrize("name", VECTORS["DIAL"]["cases"])
def test_a_row_of_the_dialects_has_the_numbers_of_its_vector(name: str) -> None:
    case, (a, at_old, at_new, gradient) = VECTORS["DIAL"]["cases"][name], named_rows()[name]
    first = [0, 2, 5, 6]  # tokens that begin a completion
    tokens = case.get("token_advantages")
    wanted = [tokens[i] for i in first] if tokens else case["advantage"]
    assert numbers(a) == [pytest.approx(x, abs=1e-6) for x in wanted]
    assert float(at_old) == pytest.approx(case["at_old"], abs=1e-6)
    assert float(at_new) == pytest.approx(case["at_new"], abs=1e-6)
    wanted = [case["token_gradient_at_old"][i] for i in first]
    assert numbers(gradient) == [pytest.approx(x, abs=1e-6) for x in wanted]


@pytest.mark.parametrize("name", [k for k, v in VECTORS["LOSS-GRPO"].items() if "at_new" in v])
def test_a_row_of_the_loss_types_has_the_numbers_of_its_vector(name: str) -> None:
    case, (at_old, at_new) = VECTORS["LOSS-GRPO"][name], named_rows()[name]
    assert float(at_old) == pytest.approx(case["at_old"], abs=1e-6)
    assert float(at_new) == pytest.approx(case["at_new"], abs=1e-6)


def test_every_recipe_algorithm_and_verb_has_its_place() -> None:
    recipes, verbs = PAGES["recipes.md"].read_text(), PAGES["reference.md"].read_text()
    assert not [name for name in paths.recipe_files() if f"`{name}`" not in recipes]
    algorithms = {p.stem for p in (paths.CONF / "algorithm").glob("*.yaml")}
    text = PAGES["algorithms.md"].read_text()
    assert not [name for name in algorithms if f"`{name}`" not in text]
    assert not [verb for verb in main.VERBS if f"`rloo {verb}`" not in verbs]


def test_every_page_is_in_the_site_and_the_readme_leads_to_the_list_of_all() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    in_site = set(re.findall(r"'([\w-]+\.md)", str(nav)))
    index = PAGES["index.md"].read_text()
    pages = {page for page in PAGES if PAGES[page].parent.name == "docs"}
    assert in_site == pages
    assert not [page for page in pages - {"index.md"} if f"({page}" not in index]
    assert "docs/index.md" in PAGES["README.md"].read_text()


def test_the_page_of_rewards_names_every_argument_of_a_reward() -> None:
    named = {w for row in table_rows(PAGES["rewards.md"]) for w in re.findall(r"`(\w+)", row[0])}
    assert named | {"completions_ids"} >= REWARD_KWARGS
