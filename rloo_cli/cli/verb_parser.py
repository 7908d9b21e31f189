"""An argparse parser for each verb of `verbs.py`: help, and flags anywhere among the words.

Invalid arguments raise ConfigError (exit 2), which names the nearest flag.
"""

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import NoReturn

from rloo_cli.cli.verbs import COMMON_FLAGS, GROUPS, NEW, VERBS, WORD_HELP
from rloo_cli.utils.errors import ConfigError, refuse

ASKED_BY_VERB = ("RUN", "SHELL", "TRACKER", "KEY")  # the verb itself reports when these are missing
WIDTH, FLAG_WIDTH = 100, 34  # characters of a help line, and of its flag column


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb, or of one of its actions: `rloo sweep`, `rloo sweep show`."""

    def __init__(self, verb: str, action: str | None = None, with_words: bool = True):
        """Without an action: for the whole verb, for its help."""
        known, self.verb, self.action = VERBS[verb], verb, action
        usages = {a: w for a, w in known.words.items() if action in (None, a)}
        self.forms = [" ".join(filter(None, ("rloo", verb, *pair))) for pair in usages.items()]
        super().__init__(
            f"rloo {verb} {action or ''}".strip(),
            usage="\n       ".join(f"{form} [flags]" for form in self.forms),
            description="\n".join([f"{verb}: {known.summary}", *_wrapped(known.details)]),
            epilog="\n".join(["examples:", *[f"  {example}" for example in known.examples]]),
            formatter_class=_HelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.takes_command = "COMMAND ..." in usages.values()
        self.words = self._add_words([*usages.values()] if with_words else [])
        group = self.add_argument_group("flags")
        sole = group.add_mutually_exclusive_group()
        allowed = known.flags_of.get(action or NEW)
        for spec, text in (known.flags | COMMON_FLAGS).items():
            name = re.split("[ ,]", spec)[0]
            if allowed is None or name in (*allowed, "--json") or spec in COMMON_FLAGS:
                _add_flag(sole if name in known.exclusive else group, spec, text)

    def _add_words(self, forms: Sequence[str]) -> list[str]:
        """Add the positional arguments that these usages name. -> their names"""
        group, names = self.add_argument_group("words"), []
        for word in dict.fromkeys(" ".join(forms).split()):
            name, optional = word.strip("[]"), "[" in word or word in ASKED_BY_VERB
            if not name.isupper() or name.lower() in names:
                continue
            nargs = "*" if f"{word} ..." in forms else "?" if optional else None
            nargs = argparse.REMAINDER if self.takes_command else nargs
            names.append(name.lower())
            text = WORD_HELP.get(name) or argparse.SUPPRESS
            group.add_argument(name.lower(), nargs=nargs, metavar=name, help=text)
        if any("=" in form for form in forms):
            names.append("overrides")
            text = WORD_HELP["key=value"]
            group.add_argument("overrides", nargs="*", metavar="key=value", help=text)
        return names

    @property
    def flags(self) -> list[str]:
        """Every flag as typed, in its long and short spelling."""
        return [flag for action in self._actions for flag in action.option_strings]

    def parse_words(self, args: Sequence[str]) -> argparse.Namespace:
        """The flags, in any position, then the words. Raises ConfigError.

        `overrides` begins with each --config-dir=DIR, as `compose_config` takes it.
        """
        if self.takes_command:  # the command's own flags start at the first that is not ours
            end = self._end_of_flags(args)
            options = self.parse_args(args[:end])
            options.command = [*args[end:]]
            return options
        flags_alone = VerbParser(self.verb, self.action, with_words=False)
        options, words = flags_alone.parse_known_args(args)
        starts = [at for at, word in enumerate(words) if word[:1] == "-" and " " not in word]
        if starts:
            from rloo_cli.config.mistakes import unknown_flag_problem  # lazy: only for an error

            known = (self.prog, self.flags, "overrides" in self.words, self.forms[0])
            others = {f: f"rloo {verb}" for verb in VERBS for f in VerbParser(verb).flags}
            raise ConfigError(*[unknown_flag_problem(words[at:], others, *known) for at in starts])
        options, more = self.parse_known_args(words, options)
        if more:
            self.error(f"{more[0]!r} is an extra word")
        self._check_needs(options)
        if "overrides" in self.words:
            self._sort_words(options)
            self._check_recipe(options)
        return options

    def _end_of_flags(self, args: Sequence[str]) -> int:
        """How many of the first words are flags of this verb, with their values."""
        with_value = {f for a in self._actions if a.nargs != 0 for f in a.option_strings}
        end = 0
        while end < len(args) and args[end].partition("=")[0] in self.flags:
            end += 2 if args[end] in with_value else 1
        return end

    def _check_needs(self, options: argparse.Namespace) -> None:
        """Raises ConfigError for a flag without a flag that it needs."""
        flags = {flag: action for action in self._actions for flag in action.option_strings}
        values = {flag: getattr(options, action.dest, None) for flag, action in flags.items()}
        given = {flag for flag, value in values.items() if value != flags[flag].default}
        for flag, others in VERBS[self.verb].needs.items():
            if flag in given and given.isdisjoint(other.split()[0] for other in others):
                fix = f"{others[0]} {flag}" + ("" if values[flag] is True else f" {values[flag]}")
                why = f"{flag}: {self._help_of(flags[flag])}"
                refuse("command line", f"{flag} needs {' or '.join(others)}", fix, why)

    def _check_recipe(self, options: argparse.Namespace) -> None:
        """Raises ConfigError if the usage has +recipe=NAME but the arguments have no override."""
        if options.overrides or " +recipe=NAME " not in self.forms[0] or getattr(options, "run", 0):
            return
        what, why = f"{self.prog} needs a recipe or keys", "found no +recipe=NAME and no key=value"
        refuse("command line", what, self.forms[0], why)

    def _sort_words(self, options: argparse.Namespace) -> None:
        """Name the first words that are not key=value, in any position."""
        names = [name for name in self.words if name != "overrides"]
        words = [w for name in names if (w := getattr(options, name)) is not None]
        words += options.overrides
        for name in names:
            bare = next((word for word in words if is_bare(word)), None)
            setattr(options, name, bare)
            if bare is not None:
                words.remove(bare)
        folders = getattr(options, "config_dir", [])
        options.overrides = [*[f"--config-dir={folder}" for folder in folders], *words]

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        wrong = re.match(r"argument (\S+?)[:/]", message)
        why, fix = f"its flags are {', '.join(self.flags)}", self.forms[0]
        if not wrong:
            why = f"it takes {self.forms[0].removeprefix(self.prog).strip() or 'no words'}"
        for action in self._actions if wrong else ():
            if wrong and wrong[1] in action.option_strings:
                why = f"{wrong[1]} {action.metavar or ''}: {self._help_of(action)}"
                fix += EXAMPLE_VALUES.get(str(action.metavar), "").replace("FLAG", wrong[1])
        refuse("command line", f"{self.prog}: {message}", fix, why)

    def _help_of(self, action: argparse.Action) -> str:
        return str(action.help).replace("%(default)s", str(action.default))


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=FLAG_WIDTH, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """A flag with its value once: `--cfg job|hydra|all, -c`."""
        first, *short = action.option_strings or [str(action.metavar)]
        value = f" {action.metavar}" if action.option_strings and action.nargs != 0 else ""
        return ", ".join([f"{first}{value}", *short])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False)


def is_bare(word: str) -> bool:
    """Whether it is a name, not `key=value`, `+recipe=NAME` or `~key`."""
    return "=" not in word and not word.startswith(("+", "~"))


def _number_type(
    name: str, kind: type[int] | type[float], is_allowed: Callable[[float], bool]
) -> Callable[[str], float]:
    """A function that parses a flag's number or raises ValueError; argparse reports `name`."""

    def read_number(text: str) -> float:
        value = kind(text)
        if not is_allowed(value):
            raise ValueError
        return value

    read_number.__name__ = name
    return read_number


TYPES: dict[str, Callable[[str], object]] = {  # name of a flag's value -> how to parse it
    "N": _number_type("count", int, lambda value: 0 < value <= 10**12),
    "STEP": _number_type("whole_number", int, lambda value: 0 <= value <= 10**12),
    "MEAN": _number_type("mean_count", float, lambda value: 1 <= value <= 10**6),
    "X": _number_type("tolerance", float, lambda value: 0 <= value < 1),
    "SECONDS": _number_type("seconds", float, lambda value: value > 0),
}
EXAMPLE_VALUES = {"X": " FLAG 1e-5", "SECONDS": " FLAG 2"}  # name of a value -> as pasted


def _add_flag(group: argparse._ArgumentGroup, spec: str, text: str) -> None:
    """Add a flag as `verbs.py` writes it."""
    first, *short = spec.split(", ")
    name, _, value = first.partition(" ")
    value, repeated = value.removesuffix(" ..."), value.endswith(" ...")
    value, _, default = value.partition("=")
    text = text.replace("%", "%%")
    if not value:
        group.add_argument(name, *short, action="store_true", help=text)
    elif repeated:
        kind = TYPES.get(value, str)
        text = text if "repeated" in text else f"{text}; may be repeated"
        group.add_argument(name, *short, action="append", default=[], type=kind, metavar=value,
                           help=text)  # fmt: skip
    else:
        group.add_argument(
            name, *short, metavar=value, help=f"{text} (%(default)s)" if default else text,
            default=default or None, type=TYPES.get(value, str),
            choices=value.split("|") if "|" in value else None,
        )  # fmt: skip


def parse_verb(verb: str, args: Sequence[str]) -> argparse.Namespace:
    """The arguments of a verb, with its `action` (NEW for none). Raises ConfigError."""
    actions, rest, action = VERBS[verb].words, [*args], NEW
    if len(actions) > 1:
        words = VerbParser(verb, with_words=False).parse_known_args(rest)[1]
        action = words[0] if words and words[0] in actions else NEW
        wrong = words[:1] if not actions.get(NEW) and words[:1] != [action] else []
        if action not in actions or (wrong and is_bare(wrong[0]) and wrong[0][:1] != "-"):
            _refuse_unknown_action(verb, words)
    if action:
        rest.remove(action)
    options = VerbParser(verb, action).parse_words(rest)
    options.action = action
    return options


def _refuse_unknown_action(verb: str, words: Sequence[str]) -> NoReturn:
    from rloo_cli.config.old_names import nearest_names  # lazy: only for an error

    named = [*filter(None, VERBS[verb].words)]
    near = nearest_names(words[0], [*named, *VerbParser(verb).flags])[:1] if words else []
    what = f"rloo {verb} {words[0]}: not understood" if words else f"rloo {verb} needs a verb"
    forms = VerbParser(verb, near[0] if near and near[0] in named else None).forms
    fix = near[0] if near and near[0].startswith("-") else " or ".join(forms)
    refuse("command line", what, fix, f"it takes {', '.join(named)}")


def verb_help(verb: str) -> str:
    """The text of `rloo VERB --help`."""
    return VerbParser(verb).format_help().rstrip()


def help_overview() -> str:
    """The text of `rloo --help`: the verbs in groups."""
    width = max(map(len, VERBS))
    lines = ["usage: rloo VERB [+recipe=NAME] [key=value ...] [flags]"]
    for group in GROUPS:
        verbs = {name: verb.summary for name, verb in VERBS.items() if verb.group == group}
        lines += ["", f"{group}:", *[f"  {name:<{width}}  {text}" for name, text in verbs.items()]]
    lines += ["", "rloo VERB --help shows flags and examples; rloo recipes lists the recipes."]
    return "\n".join([*lines, "Start with: rloo train +recipe=quickstart"])
