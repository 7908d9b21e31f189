"""A wheel built from the checkout, installed elsewhere, does what the checkout does."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from cli_cases import Rloo, surroundings

from rloo_cli.utils import paths
from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "build", *words], check=True, capture_output=True)
    return next(folder.glob("rloo_cli-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Rloo:
    """The command of an environment that has the wheel, with the libraries of this one.

    Their folder is only put on its path, so that the editable install in it has no effect.
    """
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    flags = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *flags, str(wheel)],
        check=True,
    )
    packages = next((home / "lib").glob("python3*/site-packages"))
    (packages / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = surroundings(tmp_path_factory.getbasetemp())
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    return Rloo(elsewhere, environment, (str(home / "bin" / "rloo"),))


def test_the_wheel_holds_the_package_with_its_yaml_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert len(tops) == 2 and "rloo_cli" in tops  # and its .dist-info
    for folder in (paths.CONF, paths.RECIPES):
        for path in folder.rglob("*.yaml"):
            assert f"rloo_cli/_yaml/{path.relative_to(ROOT)}" in names
    for path in (*paths.SLURM.iterdir(), *(ROOT / "scripts").glob("*/*.py")):
        assert f"rloo_cli/_yaml/{path.relative_to(ROOT)}" in names
    for path in paths.DOCS.rglob("*.md"):
        assert f"rloo_cli/_yaml/{path.relative_to(ROOT)}" in names
    assert not [name for name in names if name.endswith((".png", ".svg", ".css"))]
    assert not [name for name in names if "__pycache__" in name or "/runs/" in name]


def test_what_is_installed_is_the_wheel_and_not_the_checkout(installed: Rloo) -> None:
    python = Path(installed.program[0]).with_name("python")
    code = "from rloo_cli.utils import paths; print(paths.CONF); print(paths.RECIPES)"
    said = subprocess.run(
        [str(python), "-c", code],
        cwd=installed.folder,
        env=installed.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    for line in said.stdout.splitlines():
        assert os.path.join("site-packages", "rloo_cli", "_yaml") in line
        assert str(ROOT) not in line and Path(line).is_dir()


def test_help_and_recipes_are_those_of_the_checkout(installed: Rloo) -> None:
    checkout = Rloo(installed.folder, installed.environment | {"PYTHONPATH": str(ROOT)})
    job = ["slurm", "render", "+recipe=tldr_1b"]
    page = ["docs", "start"]
    for words in (["--help"], ["recipes"], ["recipes", "show", "tldr_1b"], ["config"], page, job):
        ours, theirs = checkout(*words), installed(*words)
        assert ours.code == theirs.code == 0, theirs.said
        assert ours.out == theirs.out
    ended = installed("train", "+recipe=quickstart", "algorithm.num_generation=4")
    assert ended.code == 2 and "did you mean algorithm.num_generations" in ended.err
    script = installed("train", "+recipe=openenv_echo", "--dry-run")  # it names a file of scripts/
    assert script.code == 0, script.said
    assert installed.left() == ["runs", "runs/slurm"]  # where a rendered job writes its log


def test_the_installed_command_trains(installed: Rloo) -> None:
    for words, run in (
        (["+recipe=smoke"], "smoke"),
        (["+recipe=tldr_1b", "+debug=cpu"], "debug/tldr_1b"),
    ):
        ended = installed("train", *words)
        assert ended.code == 0, ended.said
        assert (installed.folder / "runs" / run / "final" / "model.safetensors").is_file()
        assert read_json(installed.folder / "runs" / run / "run.json")["state"] == "finished"


def test_the_installed_command_runs_the_quickstart(installed: Rloo) -> None:
    ended = installed("train", "+recipe=quickstart", timeout=1500)
    assert ended.code == 0, ended.said
    summary = read_json(installed.folder / "runs" / "quickstart" / "summary.json")
    assert summary["before"] < 0.5 and summary["after"] > 0.9
