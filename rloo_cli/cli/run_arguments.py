"""Reads the arguments of a verb that is about a run, and prints its answer.

`rloo VERB [RUN] [flags]`: the run is optional here, and the finding of it names what is near.
"""

import argparse
from typing import NoReturn

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
        why = f"did you mean {close[0]}?" if close else ""
        raise ConfigError(Problem(f"{self.prog}: {message}", "command line", why, f"{self.usage}"))
