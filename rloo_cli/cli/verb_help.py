"""Holds the help of `rloo` and of each of its verbs. Imports nothing that is slow.

A verb's flags are listed here once: `rloo VERB --help` prints them, and the shell completes them.
"""

import re
from dataclasses import dataclass, field

from rloo_cli.utils import paths


@dataclass(frozen=True)
class VerbHelp:
    """The help of one verb."""

    summary: str  # its line in `rloo --help`
    usage: tuple[str, ...]
    flags: dict[str, str] = field(default_factory=dict)  # "--step N" -> what it does
    examples: tuple[str, ...] = ()
    details: str = ""  # lines below the usage


CONFIG_DIR = {
    "--config-dir DIR, -cd": "a folder with groups and recipes of your own; may be repeated"
}
COMMON_FLAGS = {
    "--debug": "print tracebacks below an error",
    "--errors=json": "print errors as JSON, for tools",
    "--help, -h": "print this",
}
RUN_NOTE = "RUN is a run's folder, or its name under runs/."

VERBS: dict[str, VerbHelp] = {
    "train": VerbHelp(
        "train a policy",
        ("rloo train [+recipe=NAME] [key=value ...] [flags]",),
        {
            "--dry-run": "check everything, print the plan and the config, train nothing",
            "--json": "what came of it on stdout (with --dry-run its plan); all else on stderr",
            "--multirun, -m": "one run after the other, for each combination of key=a,b",
            "--cfg job|hydra|all, -c": "print the composed config instead of training",
            "--resolve": "with --cfg: with every interpolation resolved",
            "--package KEY, -p": "with --cfg: only this section",
            **CONFIG_DIR,
        },
        (
            "rloo train +recipe=quickstart",
            "rloo train +recipe=quickstart algorithm.beta=0.01 name=mine --dry-run",
            "rloo train +recipe=quickstart resume=auto",
            "rloo train --multirun +recipe=quickstart algorithm.beta=0.01,0.05",
        ),
        "+recipe is a name of `rloo recipes` or a file, +recipe=my.yaml. `rloo config` lists all\n"
        "keys. A run writes to root/name, runs/NAME as a rule; Ctrl-C saves it, and resume=auto\n"
        "goes on with it. --multirun returns logging.objective of each job to Hydra's sweeper.",
    ),
    "sweep": VerbHelp(
        "train several configurations side by side, in turns: +recipe=NAME key=a,b",
        (
            "rloo sweep +recipe=NAME key=a,b [flags]",
            "rloo sweep show|resume SWEEP",
            "rloo sweep stop|promote SWEEP MEMBER",
            "rloo sweep clone SWEEP MEMBER key=value ...",
        ),
        {
            "--chunk N": "steps that a member trains before the next has its turn (10)",
            "--jobs N": "members that train at the same time (one on each GPU; 1 without)",
            "--name NAME": "the sweep's folder, root/NAME",
            "--keep N": "go on with the best N members only ...",
            "--at STEP": "... from this step on; --keep and --at may be repeated in pairs",
            "--by METRIC": "what they are ranked by (reward); METRIC:min = the lowest is the best",
            "--dry-run": "check every member and list them, train nothing",
            "--multirun, -m": "accepted, and changes nothing",
            "--json": "the whole state of the sweep on stdout; what is for people on stderr",
            **CONFIG_DIR,
        },
        (
            "rloo sweep +recipe=quickstart algorithm.beta=0.0,0.01,0.05",
            "rloo sweep +recipe=quickstart seed=1,2,3,4 --keep 2 --at 40 --by reward",
        ),
    ),
    "sft": VerbHelp(
        "fine-tune a model on completions, before RLOO",
        ("rloo sft +recipe=NAME [key=value ...]",),
        {"--json": "the model's folder and scores on stdout; all else on stderr", **CONFIG_DIR},
        ("rloo sft +recipe=tldr_mini", "rloo sft +recipe=tldr_mini sft.epochs=1 name=mine"),
        "The model is written to root/sft/NAME; model.path takes that folder.",
    ),
    "reward-model": VerbHelp(
        "train a reward model on preferences",
        ("rloo reward-model +recipe=NAME [key=value ...]",),
        {"--json": "the model's folder and scores on stdout; all else on stderr", **CONFIG_DIR},
        (
            "rloo reward-model +recipe=tldr_mini",
            "rloo reward-model +recipe=tldr_mini reward_model.epochs=1 name=mine",
        ),
        "The model is written to root/reward_model/NAME; reward.NAME.path takes that folder.",
    ),
    "vllm-serve": VerbHelp(
        "serve completions for a run from GPUs or a node of their own",
        (
            "rloo vllm-serve +recipe=NAME [key=value ...]",
            "rloo vllm-serve model.path=ORG/NAME [key=value ...]",
        ),
        {"--json": "its address on stdout, once it answers; all else on stderr", **CONFIG_DIR},
        (
            "rloo vllm-serve +recipe=quickstart",
            "rloo vllm-serve +recipe=quickstart generation.server.port=8001",
            "rloo vllm-serve model.path=make:tiny name=a_server",
        ),
        "`rloo train` with the same overrides and generation=vllm_server finds the server. One\n"
        "without a recipe serves any run that names it: generation.server.base_url=URL.",
    ),
    "eval": VerbHelp(
        "score held-out data: RUN, RUN/checkpoint-N, or +recipe=NAME model.path=...",
        (
            "rloo eval RUN [key=value ...]",
            "rloo eval RUN/checkpoint-N [key=value ...]",
            "rloo eval +recipe=NAME [model.path=... key=value ...]",
        ),
        {"--json": "the metrics on stdout; all else on stderr", **CONFIG_DIR},
        (
            "rloo eval quickstart",
            "rloo eval runs/quickstart/checkpoint-50 eval.num_generations=8",
            "rloo eval +recipe=quickstart eval.max_samples=100",
        ),
        f"{RUN_NOTE}\nIts final model is evaluated, or else its newest checkpoint.",
    ),
    "fetch": VerbHelp(
        "download what a run needs: +recipe=NAME, for machines without network",
        ("rloo fetch +recipe=NAME [key=value ...]",),
        {"--json": "each thing with its place on stdout; all else on stderr", **CONFIG_DIR},
        ("rloo fetch +recipe=quickstart", "rloo fetch +recipe=tldr_1b model.revision=main"),
    ),
    "plan": VerbHelp(
        "estimate memory, disk and time of a run: +recipe=NAME --gpu 80GiB",
        ("rloo plan +recipe=NAME [key=value ...] [flags]",),
        {
            "--gpu KIND": "the device: H100-80GB and others by name, 80GiB, or cpu",
            "--gpus N": "how many of them train",
            "--prompts N": "how many prompts the data has, for the number of steps",
            "--prompt-tokens N": "mean tokens of a prompt",
            "--completion-tokens N": "mean tokens of a completion",
            "--turns N": "mean turns of an episode, with an agent",
            "--observation-tokens N": "mean tokens of what tools say between two turns",
            "--json": "bytes, seconds and counts, for tools",
            **CONFIG_DIR,
        },
        (
            "rloo plan +recipe=quickstart --gpu cpu",
            "rloo plan +recipe=tldr_1b --gpu H100-80GB --prompts 100000 --completion-tokens 40",
        ),
    ),
    "recipes": VerbHelp(
        "list recipes; recipes show NAME; recipes copy NAME my.yaml",
        ("rloo recipes", "rloo recipes show NAME", "rloo recipes copy NAME my.yaml"),
        {"--json": "the same as data"},
        ("rloo recipes show quickstart", "rloo recipes copy quickstart my.yaml"),
    ),
    "config": VerbHelp(
        "list every key; config explain KEY; config --json",
        (
            "rloo config [+recipe=NAME] [key=value ...]",
            "rloo config explain KEY [+recipe=NAME] [key=value ...]",
        ),
        {
            "--json": "the JSON schema of a recipe, for editors; of a key: what is known of it",
            **CONFIG_DIR,
        },
        ("rloo config +recipe=quickstart", "rloo config explain algorithm.beta +recipe=quickstart"),
    ),
    "runs": VerbHelp(
        "list runs: state, age, steps, held-out score, size",
        ("rloo runs [FOLDER] [--json]",),
        {"--json": "every run with all that the list knows of it"},
        ("rloo runs", "rloo runs runs/compare"),
        "FOLDER is runs/ if none is named; runs lie in it or up to two folders below. A run whose\n"
        "process is gone without having said so is `killed`.",
    ),
    "top": VerbHelp(
        "watch a run on a screen: phases, time left, speed, memory, sample, advice",
        ("rloo top [RUN] [--once] [--json] [--every SECONDS]",),
        {
            "--once": "print one frame and end",
            "--json": "the values of the frame",
            "--every SECONDS": "between two looks at the files (2)",
        },
        ("rloo top quickstart", "rloo top quickstart --once --json"),
        RUN_NOTE + " Without one: the run\nthat was written last. Leaving never touches the run.",
    ),
    "doctor": VerbHelp(
        "before a run: what the machine lacks; after it: what went wrong, with the key to turn",
        (
            "rloo doctor [+recipe=NAME] [key=value ...] [--deep] [--json]",
            "rloo doctor RUN [--json]",
            "rloo doctor --kill-orphans RUN [--json]",
        ),
        {
            "--deep": "tokenise prompts and call every reward on two rows; imports torch",
            "--kill-orphans RUN": "end the processes that a run which has ended left running",
            "--json": "the lines, or the findings, as data",
            **CONFIG_DIR,
        },
        (
            "rloo doctor",
            "rloo doctor +recipe=quickstart --deep",
            "rloo doctor quickstart",
            "rloo doctor --kill-orphans quickstart",
        ),
        RUN_NOTE + " Before a run each line is ok, warn or\n"
        "fail, with the fix; exits with 3 where one is fail. For a RUN it reads files only, and\n"
        "exits with 20 where a pathology is found.",
    ),
    "report": VerbHelp(
        "write one HTML page that shows a run: curves, samples, seconds, memory",
        ("rloo report RUN [--out FILE.html] [--json]",),
        {
            "--out FILE.html": "where to; RUN/report.html if it is left out",
            "--json": "the figures as data, and no page",
        },
        ("rloo report quickstart", "rloo report quickstart --out report.html"),
        RUN_NOTE + " The page needs no network, and\nreads on a phone and in the dark.",
    ),
    "replay": VerbHelp(
        "compute a recorded step again; or say what another reward would have taught",
        (
            "rloo replay RUN [--json]",
            "rloo replay RUN --step N [--tolerance X] [--json]",
            "rloo replay RUN --reward FILE.py:NAME [--step N] [-n N] [--json]",
        ),
        {
            "--step N": "the step; with --reward all recorded steps if it is left out",
            "--reward FILE.py:NAME": "score the recorded completions with it instead",
            "-n N": "with --reward: how many completions are shown whose advantage flips (5)",
            "--tolerance X": "numbers this near are equal; 0 = bit for bit, as on an equal CPU",
            "--json": "the result as data",
        },
        (
            "rloo replay quickstart",
            "rloo replay quickstart --step 3",
            "rloo replay quickstart --reward new.py:score --step 3",
        ),
        RUN_NOTE + " It has recorded its rollouts\n"
        "(logging.rollouts_every=1), and is not changed. Exits with 20 where a step comes out\n"
        "differently.",
    ),
    "sync": VerbHelp(
        "send all of a run's metrics to a tracker: RUN wandb",
        ("rloo sync RUN TRACKER [--project NAME] [--json]",),
        {
            "--project NAME": "instead of the run's logging.tracker_project",
            "--json": "how many lines were sent, and where they are",
        },
        ("rloo sync quickstart wandb", "rloo sync quickstart tensorboard --json"),
        RUN_NOTE
        + " TRACKER is\none of logging.trackers, such as tensorboard or wandb. It may be repeated.",
    ),
    "push": VerbHelp(
        "send a run's model and its card to a hub, private unless told otherwise",
        ("rloo push RUN --repo ORG/NAME [flags]",),
        {
            "--repo ORG/NAME": "the repository; it is made if it is not there",
            "--public": "let everybody see it",
            "--checkpoint NAME": "a checkpoint of the run instead of final/",
            "--message TEXT": "of the commit (rloo push)",
            "--revision BRANCH": "a branch, which is made if it is not there (the main one)",
            "--dataset NAME": "the data set's name on the hub, for the card",
            "--dry-run": "print the card and the files, send nothing",
            "--json": "the result as data",
        },
        ("rloo push quickstart --repo ORG/NAME", "rloo push quickstart --dry-run"),
        RUN_NOTE
        + " The token is the\nhub's own (hf auth login, or HF_TOKEN). Repeat it as you like.",
    ),
    "samples": VerbHelp(
        "show what a run wrote: --step N --worst; --eval",
        ("rloo samples RUN [flags]",),
        {
            "--step N": "samples of this step; else of the last step that has some",
            "--worst": "the worst first",
            "--best": "the best first",
            "--reward NAME": "with --worst or --best: sort by this reward, not by the score",
            "-n N": "how many (5)",
            "--eval": "held-out samples instead",
            "--set NAME": "held-out samples of this set",
            "--json": "the whole samples, with all their fields",
        },
        ("rloo samples quickstart", "rloo samples runs/quickstart --step 40 --worst -n 20"),
        RUN_NOTE,
    ),
    "ledger": VerbHelp(
        "show what became of every prompt of a run",
        ("rloo ledger RUN [--json]",),
        {"--json": "the sums, for tools"},
        ("rloo ledger quickstart", "rloo ledger runs/quickstart --json"),
        RUN_NOTE,
    ),
    "compare": VerbHelp(
        "compare runs: curves, tables, which is better and how sure that is",
        ("rloo compare RUN... [flags]",),
        {
            "--out FOLDER": "where tables and curves are written; else comparison/ beside the runs",
            "--metric NAME": "the held-out score to compare; usually eval_reward",
            "--against LABEL": "the configuration to compare the others with; rloo, else the first",
            "--unfinished": "count unfinished runs too, as far as they are",
            "--anyway": "compare what is not comparable, with a warning",
            "--first-difference": "only say where two runs part first; exit with 20 if they do",
            "--tolerance X": "with it: numbers this near (relatively) are equal; 0 = bit for bit",
            "--json": "all figures, seed by seed",
        },
        (
            "rloo compare mine other",
            "rloo compare mine other --first-difference",
            "rloo compare runs --out comparison --metric eval_reward --unfinished",
        ),
        "RUN is a folder, a name under runs/, a folder with runs in it, or a pattern in quotes.",
    ),
    "verify-resume": VerbHelp(
        "prove that a killed run ends as one left alone: +recipe=NAME",
        ("rloo verify-resume +recipe=NAME [key=value ...] [flags]",),
        {
            "--steps N": "steps of each run (6)",
            "--kill-in-step S": "in whose update the second run is killed (the last but one)",
            "--inside-save": "kill it inside its first save instead",
            "--tolerance X": "numbers this near (relatively) are equal; 0 = bit for bit",
            "--keep": "keep the folders of both runs; they are kept where they differ",
            "--json": "the result as data",
        },
        (
            "rloo verify-resume +recipe=smoke",
            "rloo verify-resume +recipe=smoke --steps 4 --inside-save",
        ),
        "Both runs train in processes of their own, in a temporary folder under root. Exits with\n"
        "20 where anything differs, and says what first.",
    ),
    "slurm": VerbHelp(
        "write a recipe as a batch job: render or submit [KIND] +recipe=NAME",
        (
            "rloo slurm render [KIND] +recipe=NAME [key=value ...]",
            "rloo slurm submit [KIND] +recipe=NAME [key=value ...]",
        ),
        {"--json": "the script, or the job's number, as data", **CONFIG_DIR},
        (
            "rloo slurm render +recipe=quickstart slurm.time=1:00:00",
            "rloo slurm render sweep +recipe=quickstart algorithm.beta=0.01,0.05",
        ),
        "KIND: train, train_and_serve, sweep, or eval (which also takes a run's folder). render\n"
        "prints the script and needs no Slurm; submit sends it with sbatch.",
    ),
    "migrate": VerbHelp(
        "turn a TRL or ms-swift command line or config into a recipe",
        ("rloo migrate COMMAND ...", "rloo migrate FILE.yaml [flags]"),
        {
            "--world-size N": "processes that the old run had, where its command does not say",
            "--from DIALECT": "which tool and version it was written for",
            "--json": "the recipe's text as JSON",
        },
        (
            "rloo migrate trl rloo --model_name_or_path M --dataset_name D > my.yaml",
            "rloo migrate --world-size 8 config.yaml > my.yaml",
        ),
    ),
    "reward": VerbHelp(
        "try a reward on data and tricks: list, test [REWARD] +recipe=NAME",
        (
            "rloo reward list [--json]",
            "rloo reward test [REWARD] +recipe=NAME [key=value ...] [flags]",
        ),
        {
            "--rows N": "rows of the data to try it on (8)",
            "--against REWARD": "a second reward: do the two order completions alike?",
            "--json": "all figures, and every completion that could be exploited",
            **CONFIG_DIR,
        },
        (
            "rloo reward list",
            "rloo reward test mine.py:score +recipe=quickstart --rows 20",
            "rloo reward test length_chars +recipe=quickstart --against exact_match",
        ),
        "REWARD is file.py:function, a reward of the recipe or a choice of conf/reward; without\n"
        "one, all of the recipe's. test exits with 20 where it finds an error or an exploit.",
    ),
    "completion": VerbHelp(
        "print the shell's completion script: bash, zsh or fish",
        ("rloo completion bash|zsh|fish",),
        {"--json": "the script as JSON"},
        ('eval "$(rloo completion bash)"', "rloo completion zsh > ~/.zfunc/_rloo"),
        "To keep it, put the line for your shell into its start-up file, ~/.bashrc for bash.",
    ),
}


def help_overview() -> str:
    """The text of `rloo --help`: every verb and every recipe in a line."""
    files = paths.recipe_files()
    headlines = {n: p.read_text().partition("\n")[0].lstrip("# ") for n, p in files.items()}
    lines = [
        "usage: rloo VERB [+recipe=NAME] [key=value ...]",
        "",
        "verbs (rloo VERB --help has the flags and examples of each):",
        *align_columns({name: verb.summary for name, verb in VERBS.items()}),
        "",
        "recipes:",
        *align_columns(headlines),
        "",
        "try: rloo train +recipe=quickstart",
    ]
    return "\n".join(lines)


def verb_help_text(name: str) -> str:
    """The text of `rloo VERB --help`."""
    verb = VERBS[name]
    starts = ["usage: ", *["       "] * len(verb.usage)]
    lines = [f"{start}{line}" for start, line in zip(starts, verb.usage, strict=False)]
    lines += ["", f"{name}: {verb.summary}", *verb.details.splitlines()]
    lines += ["", "flags:", *align_columns(verb.flags | COMMON_FLAGS)]
    return "\n".join([*lines, "", "examples:", *[f"  {example}" for example in verb.examples]])


def verb_flags(name: str) -> list[str]:
    """Every flag of a verb as it is typed, in its long and its short spelling."""
    text = " ".join([*VERBS[name].flags, *COMMON_FLAGS]) if name in VERBS else ""
    return re.findall(r"(?<!\S)--?[a-z][a-z-]*(?:=json)?", text)


def flag_values(name: str, flag: str) -> list[str] | None:
    """The values that a flag of a verb takes, or [] if they cannot be listed.

    Returns None for a flag without a value, and for one that is not a flag of this verb.
    """
    for usage in VERBS[name].flags if name in VERBS else ():
        spellings, value = usage.split(", "), usage.split(",")[0].partition(" ")[2]
        if value and flag in {spelling.partition(" ")[0] for spelling in spellings}:
            return value.split("|") if "|" in value else []
    return None


def align_columns(cells: dict[str, str]) -> list[str]:
    """Lines of two columns, the first as wide as its longest cell."""
    width = max(map(len, cells), default=0)
    return [f"  {left:<{width}}  {right}" for left, right in cells.items()]
