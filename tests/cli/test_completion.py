"""`rloo completion`: the scripts of the shells, in real shells, and the words they ask for."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from assert_refused import assert_refused

from rloo_cli.cli import completion, main
from rloo_cli.cli.verbs import VERBS
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`ask(*words)`: what a verb prints, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        assert main.find_verb([*words])() == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_of_a_shell_has_verbs_and_flags_and_asks_for_words(shell: str, ask) -> None:
    script = ask("completion", shell)
    assert "rloo completion query" in script
    for verb, known in VERBS.items():
        assert re.search(rf"\b{verb}\b", script)
        flags = [flag.split()[0].strip(",-") for flag in known.flags]
        assert all(re.search(rf"-l {flag}|--{flag}|-{flag}", script) for flag in flags), verb
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


COMPLETED = {  # what is typed before TAB -> what stands there after it
    "rloo samp": "rloo samples ",
    "rloo train +recipe=qu": "rloo train +recipe=quickstart ",
    "rloo train +recipe=smoke algorithm=gr": "rloo train +recipe=smoke algorithm=grpo ",
    "rloo train algorithm.kl_in=l": "rloo train algorithm.kl_in=loss ",
    "rloo train train.forward_all=f": "rloo train train.forward_all=false ",
    "rloo train algorithm.be": "rloo train algorithm.beta=",
    "rloo train tra": "rloo train train.",
    "rloo train --dr": "rloo train --dry-run ",
    "rloo train +recipe=smoke --dr": "rloo train +recipe=smoke --dry-run ",
    "rloo train --dry-run +recipe=qu": "rloo train --dry-run +recipe=quickstart ",
    "rloo train --cfg j": "rloo train --cfg job ",
    "rloo train -m algorithm=rloo,gr": "rloo train -m algorithm=rloo,grpo ",
    "rloo samples --wo": "rloo samples --worst ",
    "rloo eval mi": "rloo eval mine ",
    "rloo ledger m": "rloo ledger mine ",
    "rloo compare mine ot": "rloo compare mine other ",
    "rloo slurm render sw": "rloo slurm render sweep ",
    "rloo train +recipe=my": "rloo train +recipe=my.yaml ",
    "rloo train --config-dir ru": "rloo train --config-dir runs/",
}
ZSH_HERE = Path(sys.prefix, "zsh")  # Debian's package, unpacked by the Makefile
UNPACKED_ZSH = """
module_path=(ZSH/usr/lib/*/zsh/*([1])); zmodload zsh/zle zsh/complete zsh/computil zsh/zutil
fpath=(ZSH/usr/share/zsh/functions{,/**/*}(/)); setopt zle
"""
PLAIN_ZSH = """
unsetopt prompt_cr prompt_sp beep; setopt no_auto_menu no_list_ambiguous no_always_last_prompt
unset zle_bracketed_paste; autoload -U compinit; compinit -u -D; bindkey -e; PROMPT='$ '
stty cols 200; eval "$(<script)"
"""
PLAIN_BASH = "bind 'set bell-style none'; stty cols 200; source ./script\n"


def start_of(shell: str) -> tuple[list[str], str]:
    """The command of a shell without anybody's settings, and its first lines."""
    if shell == "bash":
        return ["/bin/bash", "--norc", "--noprofile", "-i"], PLAIN_BASH
    found = shutil.which("zsh")
    here = ZSH_HERE / "bin" / "zsh"
    if not found and not here.exists():
        pytest.skip("no zsh: apt-get install zsh")
    unpacked = "" if found else UNPACKED_ZSH.replace("ZSH", str(ZSH_HERE))
    return [found or str(here), "-f", "-i"], unpacked + PLAIN_ZSH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two runs, a recipe and `rloo`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rloo").write_text(f'#!/bin/sh\nexec {sys.executable} -m rloo_cli "$@"\n')
    (tmp_path / "bin" / "rloo").chmod(0o755)
    for name in ("mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "my.yaml").write_text("# Mine.\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_in_a_real_shell_completes_words_and_flags(shell: str, folder: Path, ask) -> None:
    (folder / "script").write_text(ask("completion", shell))
    command, first = start_of(shell)
    (folder / "first").write_text(first)
    for terminal in open_terminal(command, folder):
        os.write(terminal, b"source ./first\n")
        heard(terminal, "$ ", 5)
        for typed, whole in COMPLETED.items():
            os.write(terminal, f"{typed}\t".encode())
            said = heard(terminal, whole)
            assert said.endswith(whole), (typed, said[-200:])
            os.write(terminal, b"\x15")  # Ctrl-U: the line is empty again


def open_terminal(command: list[str], folder: Path) -> Iterator[int]:
    """A terminal in which the command runs, until the block has ended."""
    variables = {"PATH": f"{folder}/bin:/usr/bin:/bin", "TERM": "dumb", "PS1": "$ "}
    variables |= {"RLOO_CACHE": str(folder / "cache"), "HOME": str(folder), "LANG": "C.UTF-8"}
    variables |= {"INPUTRC": "/dev/null", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(command[0], command, variables)
    try:
        yield terminal
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def heard(terminal: int, wanted: str, wait_s: float = 30.0) -> str:
    """What a terminal says until it ends as wanted and falls silent, or for so long."""
    said, limit = "", time.monotonic() + wait_s
    while time.monotonic() < limit:
        ready = select.select([terminal], [], [], 0.3)[0]
        if ready:
            said += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
            said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
        elif said.endswith(wanted):
            break
    return said


@pytest.mark.process
@pytest.mark.parametrize(
    ("typed", "some"),
    [
        (["train", "+rec"], {f"+recipe={name}" for name in paths.recipe_files()}),
        (["train", "+debug=c"], {"+debug=cpu"}),
        (["train", "algorithm.be"], {"algorithm.beta="}),
        (["train", "+recipe=smoke", "reward=length_c"], {"reward=length_chars"}),
        (["train", "--cfg", "job", "+debug=c"], {"+debug=cpu"}),
        (["config", "explain", "algorithm.be"], {"algorithm.beta"}),
        (["recipes", "c"], {"copy"}),
        (["recipes", "show", "smok"], {"smoke"}),
        (["docs", "rew"], {"rewards"}),
        (["sync", "mine", "ten"], {"tensorboard"}),
        (["completion", "z"], {"zsh"}),
        (["train", "nonsense"], {""}),
        (["nonsense", "a"], {""}),
        (["train"], {""}),
    ],
)
def test_a_half_typed_word_is_completed(typed: list[str], some: set[str], ask) -> None:
    assert {*ask("completion", "query", *typed).rstrip("\n").split("\n")} == some


def test_completion_without_a_shell_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    with pytest.raises(ConfigError) as refused:
        main.find_verb(["completion"])()
    assert_refused(refused, fix='eval "$(rloo completion fish)"')
