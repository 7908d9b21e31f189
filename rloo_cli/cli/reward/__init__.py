"""`rloo reward`: list rewards, and test what a policy could exploit in one.

REWARD is file.py:function, a reward of the recipe or a choice of conf/reward; by default all of the
recipe's rewards are tested. `test` exits with 20 if it finds something.

    completions  Makes right answers in many forms, and tricks
    subject      Builds the rewards and reads rows of the data
    probe        Calls the reward and judges the scores
    tables       Prints a probe
    listing      Lists the rewards
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rloo_cli.cli.reward import listing, probe, tables
from rloo_cli.cli.reward.probe import RewardProbe
from rloo_cli.cli.reward.subject import ProbeSubject, compose_subject, open_subject
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import hf_cache
from rloo_cli.utils.errors import FOUND_CODE, refuse
from rloo_cli.utils.files import JsonObject


def run(args: list[str]) -> int:
    """Run the verb. Raises RunError for an unusable config, data set or reward."""
    options = parse_verb("reward", args)
    return _run_list(options) if options.action == "list" else _run_test(options)


def _run_list(options: argparse.Namespace) -> int:
    entries = listing.list_rewards([Path(folder) for folder in options.config_dir])
    if options.json:
        print(json.dumps(listing.listing_json(entries), indent=2))
    else:
        print("\n".join(listing.listing_lines(entries)))
    return 0


def _run_test(options: argparse.Namespace) -> int:
    subject = _open(options.reward, options, options.against)
    probes = [probe.probe_reward(reward, subject) for reward in subject.rewards]
    summed = probe.weighted_sum(probes, subject)
    probes += [] if summed is None else [summed]
    agreement = None
    if options.against is not None:
        agreement = _compare_with(options.against, options, subject, probes)
    if options.json:
        report: JsonObject = {"rewards": [one.to_json() for one in probes], "against": agreement}
        print(json.dumps(report, indent=2))
    else:
        for line in tables.probe_report(subject, probes, agreement):
            print(line)
    return FOUND_CODE if any(one.has_findings for one in probes) else 0


def _compare_with(
    name: str, options: argparse.Namespace, subject: ProbeSubject, probes: Sequence[RewardProbe]
) -> JsonObject:
    """Test a second reward on the same completions. -> agreement of the rankings, by reward"""
    other = _open(name, options, options.reward)
    if len(other.rewards) != 1:
        why, fix = f"found {len(other.rewards)}", "--against NAME, or --against FILE.py:NAME"
        refuse("command line", "--against takes one reward", fix, why)
    other.rows = subject.rows
    second = probe.probe_reward(other.rewards[0], other)
    agreement = {one.name: probe.compare_orders(one.values, second.values) for one in probes}
    errors = [error.message for error in second.errors.values()]
    return {"reward": name, "errors": errors, "agreement": agreement}


def _open(name: str | None, options: argparse.Namespace, other: str | None = None) -> ProbeSubject:
    composed, config, names = compose_subject(name, options.overrides, other)
    with hf_cache.recorded_command(composed.user_overrides):
        return open_subject(config, names, options.rows)
