"""Reads the arguments of a verb that is about a run, and prints its answer.

`rloo VERB [RUN] [flags]`: the run is optional here, and the finding of it names what is near.
"""

import argparse
import sys
from typing import NoReturn

from rich.console import Console

from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import ConfigError, Problem


class RunArgumentParser(argparse.ArgumentParser):
    """Reads a verb's words; what it cannot read is a ConfigError (exit 2)."""

    def __init__(self, verb: str, usage: str):
        super().__init__(prog=f"rloo {verb}", usage=usage, add_help=False, allow_abbrev=False)
        self.add_argument("run", nargs="?", metavar="RUN")

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        flags = [f for action in self._actions for f in action.option_strings]
        close = [
            n for word in unknown[:1] if word.startswith("-") for n in nearest_names(word, flags)
        ]
        why = f"did you mean {close[0]}?" if close else f"it takes: {', '.join(flags)}"
        raise ConfigError(Problem(f"{self.prog}: {message}", "command line", why, f"{self.usage}"))


def answer_console(width_without_terminal: int) -> Console:
    """A console on stdout; that wide (cells) where stdout is a file or a pipe.

    Characters that the terminal's encoding does not have are replaced. Brackets in a text are no
    markup: it may be a model's, or of a run that somebody else made.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    # Both sizes are set, for TERM=dumb overrules a width alone.
    width, height = (None, None) if sys.stdout.isatty() else (width_without_terminal, 40)
    return Console(highlight=False, markup=False, emoji=False, width=width, height=height)
