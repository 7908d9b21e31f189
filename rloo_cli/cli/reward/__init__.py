"""`rloo reward`: what rewards there are, and what a policy could exploit in one.

    rloo reward list                                every registered reward; needs no config
    rloo reward test [REWARD] +recipe=NAME [key=value ...] [--rows N] [--against REWARD]

REWARD is file.py:function, a reward of the recipe or a choice of conf/reward; without one all of
the recipe's are tried. `test` exits with 20 where it finds something.

    completions  Makes right answers in many forms, and tricks
    subject      Builds the rewards and reads rows of the data
    probe        Calls the reward and judges what it gave
    tables       Prints a probe
    listing      Lists the rewards
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rloo_cli.cli.reward import listing, probe, tables
from rloo_cli.cli.reward.probe import RewardProbe
from rloo_cli.cli.reward.subject import ProbeSubject, compose_subject, open_subject
from rloo_cli.config import compose, hf_cache
from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import FOUND_CODE, ConfigError, Problem
from rloo_cli.utils.files import JsonObject

USAGES = {
    "list": "rloo reward list [--json]",
    "test": "rloo reward test [REWARD] +recipe=NAME [key=value ...] [--rows N] [--against REWARD]"
    " [--json]",
}
DEFAULT_ROWS = 8


class RewardArgumentParser(argparse.ArgumentParser):
    """Reads the flags of one of the two; what it cannot read is a ConfigError (exit 2)."""

    def __init__(self, action: str):
        usage = USAGES[action]
        super().__init__(prog=f"rloo reward {action}", usage=usage, add_help=False,
                         allow_abbrev=False)  # fmt: skip
        self.add_argument("--json", action="store_true")

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        flags = ", ".join(flag for action in self._actions for flag in action.option_strings)
        why = f"its flags are {flags}"
        if "invalid" in message:
            why = "a count is a whole number from 1 to 1000000"
        raise ConfigError(Problem(f"{self.prog}: {message}", "command line", why, str(self.usage)))


@dataclass(frozen=True)
class RewardWords:
    """The words of a command that are not flags."""

    reward: str | None
    overrides: list[str]
    config_dirs: list[Path]


def run(args: list[str]) -> int:
    """Run the verb. Raises RunError for a config, data or a reward that cannot be used."""
    if not args or args[0] not in USAGES:
        close = nearest_names(args[0], USAGES) if args else []
        what = f"rloo reward {args[0]}: not understood" if args else "rloo reward: to do what?"
        fix = USAGES[close[0]] if close else "\n".join(USAGES.values())
        raise ConfigError(Problem(what, "command line", f"it takes {', '.join(USAGES)}", fix))
    return {"list": _run_list, "test": _run_test}[args[0]](args[1:])


def _run_list(args: list[str]) -> int:
    rest, folders = compose.split_config_dirs(args)
    options = RewardArgumentParser("list").parse_args(rest)
    entries = listing.list_rewards(folders)
    if options.json:
        print(json.dumps(listing.listing_json(entries), indent=2))
    else:
        print("\n".join(listing.listing_lines(entries)))
    return 0


def _run_test(args: list[str]) -> int:
    parser = RewardArgumentParser("test")
    parser.add_argument("--rows", type=_count, default=DEFAULT_ROWS)
    parser.add_argument("--against")
    options, words = _read_words(parser, args)
    subject = _open(words.reward, words, options.rows, options.against)
    probes = [probe.probe_reward(reward, subject) for reward in subject.rewards]
    summed = probe.weighted_sum(probes, subject)
    probes += [] if summed is None else [summed]
    agreement = None
    if options.against is not None:
        agreement = _compare_with(options.against, words, options.rows, subject, probes)
    if options.json:
        report: JsonObject = {"rewards": [one.to_json() for one in probes], "against": agreement}
        print(json.dumps(report, indent=2))
    else:
        for line in tables.probe_report(subject, probes, agreement):
            print(line)
    return FOUND_CODE if any(one.has_findings for one in probes) else 0


def _compare_with(
    name: str, words: RewardWords, rows: int, subject: ProbeSubject, probes: Sequence[RewardProbe]
) -> JsonObject:
    """Try a second reward on the same completions. -> how far the orders agree, by reward"""
    other = _open(name, words, rows, words.reward)
    if len(other.rewards) != 1:
        why, fix = f"found {len(other.rewards)}", "--against NAME, or --against FILE.py:NAME"
        raise ConfigError(Problem("--against takes one reward", "command line", why, fix))
    other.rows = subject.rows
    second = probe.probe_reward(other.rewards[0], other)
    agreement = {one.name: probe.compare_orders(one.values, second.values) for one in probes}
    errors = [error.message for error in second.errors.values()]
    return {"reward": name, "errors": errors, "agreement": agreement}


def _read_words(
    parser: RewardArgumentParser, args: list[str]
) -> tuple[argparse.Namespace, RewardWords]:
    """The flags, and the reward and overrides. Raises ConfigError."""
    rest, folders = compose.split_config_dirs(args)
    options, words = parser.parse_known_args(rest)
    bare = [word for word in words if "=" not in word and word[:1] not in ("+", "-", "~")]
    if len(bare) > 1:
        why = f"found {' and '.join(bare)}"
        raise ConfigError(Problem("one reward is tried", "command line", why, str(parser.usage)))
    overrides = [word for word in words if word not in bare]
    if not overrides:
        what = f"{parser.prog} takes a recipe, whose data the reward is tried on"
        why = f"found {bare[0] if bare else 'no word'}, and no +recipe=NAME"
        raise ConfigError(Problem(what, "command line", why, str(parser.usage)))
    return options, RewardWords(bare[0] if bare else None, overrides, folders)


def _open(
    name: str | None, words: RewardWords, rows: int, other: str | None = None
) -> ProbeSubject:
    composed, config, names = compose_subject(name, words.overrides, words.config_dirs, other)
    with hf_cache.recorded_command(composed.user_overrides):
        return open_subject(config, names, rows)


def _count(text: str) -> int:
    """A positive number. Raises ValueError."""
    if not 0 < int(text) <= 10**6:
        raise ValueError
    return int(text)


_count.__name__ = "count"  # as argparse names it in its message
