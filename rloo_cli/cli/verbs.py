"""The verbs of the command line: purpose, words and flags of each.

`verb_parser.py` builds an argparse parser from each entry, which reads the arguments, prints the
help and provides the shell's completion script. Imports nothing slow.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Verb(NamedTuple):
    """The command line of one verb."""

    group: str  # of GROUPS
    summary: str  # its line in `rloo --help`
    words: dict[str, str]  # action -> the words after it; NEW: without an action
    flags: dict[str, str]  # `--rows N=8`, `--cfg job|all, -c`, `--keep N ...` -> what it does
    examples: tuple[str, ...]
    details: str = ""  # lines below the usage
    flags_of: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # action -> some of the flags
    exclusive: tuple[str, ...] = ()  # at most one of these flags may be given
    needs: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # flag -> needs one of these


GROUPS = ("train", "serve and scale", "inspect", "tools")  # in the order of the help
NEW = ""
KEYS = "+recipe=NAME [key=value ...]"
CONFIG_DIR = {"--config-dir DIR ..., -cd": "add a folder with your own groups and recipes"}
RESULT_AS_JSON = {"--json": "print the result as JSON; logs go to stderr"}
COMMON_FLAGS = {
    "--debug": "print tracebacks below an error",
    "--errors=json": "print errors as JSON, for tools",
    "--help, -h": "print this",
}
WORD_HELP = {  # meaning of a word in the usage
    "RUN": "a run's folder, or its name under runs/",
    "SWEEP": "a sweep's folder, or its name under runs/",
    "TRIAL": "a trial's number, its name, or a unique part of its name",
    "key=value": "keys with their values; +recipe=NAME or +recipe=my.yaml",
}

VERBS: dict[str, Verb] = {
    "train": Verb(
        "train",
        "train a policy",
        {NEW: "[+recipe=NAME] [key=value ...]"},
        {
            "--dry-run": "check everything, print plan and config, do not train",
            "--json": "print the result as JSON (with --dry-run the plan); logs go to stderr",
            "--multirun, -m": "run every combination of key=a,b, one after the other",
            "--cfg job|hydra|all, -c": "print the composed config instead of training",
            "--resolve": "with --cfg: resolve every interpolation",
            "--package KEY, -p": "with --cfg: print only this section",
            **CONFIG_DIR,
        },
        (
            "rloo train +recipe=quickstart",
            "rloo train +recipe=quickstart algorithm.beta=0.01 name=mine --dry-run",
            "rloo train +recipe=quickstart resume=auto",
            "rloo train --multirun +recipe=quickstart algorithm.beta=0.01,0.05",
        ),
        "+recipe takes a name from `rloo recipes` or a file, +recipe=my.yaml. `rloo config` lists "
        "all keys. A run writes to root/name, by default runs/NAME. Ctrl-C saves it; resume=auto "
        "resumes it. --multirun returns logging.objective of each job to Hydra's sweeper.",
        needs={"--resolve": ("--cfg job",), "--package": ("--cfg job",)},
    ),
    "sweep": Verb(
        "train",
        "train several configurations on one device, interleaved: +recipe=NAME key=a,b",
        {
            NEW: "+recipe=NAME key=a,b ...",
            "show": "SWEEP",
            "resume": "SWEEP",
            "stop": "SWEEP TRIAL",
            "promote": "SWEEP TRIAL",
            "clone": "SWEEP TRIAL key=value ...",
        },
        {
            "--chunk N": "steps that a trial trains per turn (10)",
            "--jobs N": "trials that train at the same time (one per GPU; 1 without a GPU)",
            "--name NAME": "write the sweep to root/NAME",
            "--keep N ...": "keep only the best N trials ...",
            "--at N ...": "... from step N on; --keep and --at may be repeated in pairs",
            "--by METRIC ...": "rank by METRIC (reward); METRIC:min = lowest is best",
            "--dry-run": "check and list every trial, do not train",
            "--multirun, -m": "accepted and ignored",
            "--json": "print the sweep's state as JSON; logs go to stderr",
            **CONFIG_DIR,
        },
        (
            "rloo sweep +recipe=quickstart algorithm.beta=0.0,0.01,0.05",
            "rloo sweep +recipe=quickstart seed=1,2,3,4 --keep 2 --at 40 --by reward",
        ),
        flags_of={
            "resume": ("--chunk", "--jobs"),
            **dict.fromkeys(("show", "stop", "promote", "clone"), ()),
        },
    ),
    "sft": Verb(
        "train",
        "fine-tune a model on completions before RLOO",
        {NEW: KEYS},
        {"--json": "print the model's folder and scores as JSON; logs go to stderr", **CONFIG_DIR},
        ("rloo sft +recipe=tldr_mini", "rloo sft +recipe=tldr_mini sft.epochs=1 name=mine"),
        "The model is written to root/sft/NAME; model.path takes that folder.",
    ),
    "reward-model": Verb(
        "train",
        "train a reward model on preferences",
        {NEW: KEYS},
        {"--json": "print the model's folder and scores as JSON; logs go to stderr", **CONFIG_DIR},
        (
            "rloo reward-model +recipe=tldr_mini",
            "rloo reward-model +recipe=tldr_mini reward_model.epochs=1 name=mine",
        ),
        "The model is written to root/reward_model/NAME; reward.NAME.path takes that folder.",
    ),
    "vllm-serve": Verb(
        "serve and scale",
        "serve completions for a run from separate GPUs or a separate node",
        {NEW: "+recipe=NAME | model.path=ORG/NAME [key=value ...]"},
        {"--json": "print the address as JSON when it answers; logs go to stderr", **CONFIG_DIR},
        (
            "rloo vllm-serve +recipe=quickstart",
            "rloo vllm-serve +recipe=quickstart generation.server.port=8001",
            "rloo vllm-serve model.path=make:tiny name=a_server",
        ),
        "`rloo train` with the same overrides and generation=vllm_server finds the server. A "
        "server without a recipe serves any run that sets generation.server.base_url=URL.",
    ),
    "eval": Verb(
        "train",
        "score held-out data: RUN, RUN/checkpoint-N, or +recipe=NAME model.path=...",
        {NEW: "[RUN] [+recipe=NAME] [key=value ...]"},
        {"--json": "print the metrics as JSON; logs go to stderr", **CONFIG_DIR},
        (
            "rloo eval quickstart",
            "rloo eval runs/quickstart/checkpoint-50 eval.num_generations=8",
            "rloo eval +recipe=quickstart eval.max_samples=100",
        ),
        "For a RUN, the final model is evaluated, or else the newest checkpoint.",
    ),
    "fetch": Verb(
        "serve and scale",
        "download what a run needs: +recipe=NAME, for machines without network",
        {NEW: KEYS},
        {"--json": "print each download and its path as JSON; logs go to stderr", **CONFIG_DIR},
        ("rloo fetch +recipe=quickstart", "rloo fetch +recipe=tldr_1b model.revision=main"),
    ),
    "plan": Verb(
        "serve and scale",
        "estimate memory, disk and time of a run: +recipe=NAME --gpu 80GiB",
        {NEW: KEYS},
        {
            "--gpu KIND": "device: a GPU by name (H100-80GB), by memory (80GiB), or cpu",
            "--gpus N": "number of GPUs that train",
            "--prompts N": "number of prompts in the data, to compute the steps",
            "--prompt-tokens N": "mean tokens of a prompt",
            "--completion-tokens N": "mean tokens of a completion",
            "--turns MEAN": "mean turns per episode, with an agent",
            "--observation-tokens N": "mean tokens of tool output between two turns",
            "--json": "print bytes, seconds and counts as JSON",
            **CONFIG_DIR,
        },
        (
            "rloo plan +recipe=quickstart --gpu cpu",
            "rloo plan +recipe=tldr_1b --gpu H100-80GB --prompts 100000 --completion-tokens 40",
        ),
    ),
    "recipes": Verb(
        "tools",
        "list recipes; recipes show NAME; recipes copy NAME my.yaml",
        {NEW: "", "list": "", "show": "RECIPE", "copy": "RECIPE FILE"},
        {"--json": "print the same as JSON"},
        ("rloo recipes show quickstart", "rloo recipes copy quickstart my.yaml"),
    ),
    "config": Verb(
        "tools",
        "list every key; config explain KEY; config --json",
        {NEW: "[+recipe=NAME] [key=value ...]", "explain": "KEY [+recipe=NAME] [key=value ...]"},
        {
            "--json": "print the JSON schema of a recipe; with explain: the key as JSON",
            **CONFIG_DIR,
        },
        ("rloo config +recipe=quickstart", "rloo config explain algorithm.beta +recipe=quickstart"),
    ),
    "runs": Verb(
        "inspect",
        "list runs: state, age, steps, held-out score, size",
        {NEW: "[FOLDER]"},
        {"--json": "print every run with all its fields as JSON"},
        ("rloo runs", "rloo runs runs/compare"),
        "FOLDER defaults to runs/; it is searched two levels deep. A run whose process ended "
        "without recording why is `killed`.",
    ),
    "top": Verb(
        "inspect",
        "watch a run live: phases, time left, speed, memory, sample, advice",
        {NEW: "[RUN]"},
        {
            "--once": "print one frame and exit",
            "--json": "print the values of one frame as JSON",
            "--every SECONDS=2": "seconds between refreshes",
        },
        ("rloo top quickstart", "rloo top quickstart --once --json"),
        "Without RUN, the run written last is shown. Quitting never affects the run.",
    ),
    "doctor": Verb(
        "inspect",
        "check the machine before a run; diagnose a run afterwards, with the keys to change",
        {NEW: "[RUN] [+recipe=NAME] [key=value ...]"},
        {
            "--deep": "tokenize prompts and call every reward on two rows; imports torch",
            "--kill-orphans RUN": "kill processes that an ended run left running",
            "--json": "print the checks or findings as JSON",
            **CONFIG_DIR,
        },
        (
            "rloo doctor",
            "rloo doctor +recipe=quickstart --deep",
            "rloo doctor quickstart",
            "rloo doctor --kill-orphans quickstart",
        ),
        "Before a run, each line is ok, warn or fail, with the fix; the exit code is 3 if any "
        "line is fail. For a RUN it only reads files; the exit code is 20 if it finds a problem.",
    ),
    "report": Verb(
        "inspect",
        "write an HTML page about a run: curves, samples, times, memory",
        {NEW: "RUN"},
        {
            "--out FILE.html": "output file (RUN/report.html)",
            "--json": "print the figures as JSON and write no page",
        },
        ("rloo report quickstart", "rloo report quickstart --out report.html"),
        "The page needs no network, fits a phone and has a dark mode.",
    ),
    "replay": Verb(
        "inspect",
        "recompute a recorded step, or rescore it with another reward",
        {NEW: "RUN"},
        {
            "--step STEP": "the step; with --reward, all recorded steps by default",
            "--reward FILE.py:NAME": "score the recorded completions with this reward instead",
            "-n N=5": "with --reward: number of completions to show whose advantage flips",
            "--tolerance X": "relative tolerance, below 1; 0 = bit for bit, as on one CPU",
            "--json": "print the result as JSON",
        },
        (
            "rloo replay quickstart",
            "rloo replay quickstart --step 3",
            "rloo replay quickstart --reward new.py:score --step 3",
        ),
        "The run must have recorded its rollouts (logging.rollouts_every=1). It is not changed. "
        "The exit code is 20 if a step differs.",
        exclusive=("--reward", "--tolerance"),
        needs={"--tolerance": ("--step N",)},
    ),
    "sync": Verb(
        "tools",
        "send all of a run's metrics to a tracker: RUN wandb",
        {NEW: "RUN TRACKER"},
        {
            "--project NAME": "project at the tracker (the run's logging.tracker_project)",
            "--json": "print the number of lines sent and their URL as JSON",
        },
        ("rloo sync quickstart wandb", "rloo sync quickstart tensorboard --json"),
        "TRACKER is a value of logging.trackers, such as tensorboard or wandb. You can repeat it.",
    ),
    "push": Verb(
        "tools",
        "upload a run's model and model card to the hub, private by default",
        {NEW: "RUN"},
        {
            "--repo ORG/NAME": "the repository, created if missing",
            "--public": "make the repository public",
            "--checkpoint NAME": "upload this checkpoint instead of final/",
            "--message TEXT=rloo push": "commit message",
            "--revision BRANCH": "branch, created if missing (main)",
            "--dataset NAME": "hub name of the data set, for the card",
            "--dry-run": "print the card and the files, upload nothing",
            "--json": "print the result as JSON",
        },
        ("rloo push quickstart --repo ORG/NAME", "rloo push quickstart --dry-run"),
        "The token comes from `hf auth login` or HF_TOKEN. You can repeat the upload.",
    ),
    "samples": Verb(
        "inspect",
        "show a run's completions: --step N --worst; --eval",
        {NEW: "RUN"},
        {
            "--step STEP": "show samples of this step (the last one with samples)",
            "--worst": "sort worst first",
            "--best": "sort best first",
            "--reward NAME": "with --worst or --best: sort by this reward instead of the score",
            "-n N=5": "number of samples",
            "--eval": "show held-out samples instead",
            "--set NAME": "show held-out samples of this set",
            "--json": "print whole samples with all fields as JSON",
        },
        ("rloo samples quickstart", "rloo samples runs/quickstart --step 40 --worst -n 20"),
        exclusive=("--worst", "--best"),
        needs={"--reward": ("--worst", "--best")},
    ),
    "ledger": Verb(
        "inspect",
        "show the fate of every prompt of a run",
        {NEW: "RUN"},
        {"--json": "print the sums as JSON"},
        ("rloo ledger quickstart", "rloo ledger runs/quickstart --json"),
    ),
    "compare": Verb(
        "inspect",
        "compare runs: curves, tables, differences with confidence intervals",
        {NEW: "RUN ..."},
        {
            "--out FOLDER": "write tables and curves here (comparison/ beside the runs)",
            "--metric NAME": "compare this held-out score, usually eval_reward",
            "--against LABEL": "baseline configuration (rloo, else the first)",
            "--unfinished": "include unfinished runs up to their last step",
            "--anyway": "compare incomparable runs too, with a warning",
            "--first-difference": "only find where two runs first differ; exit with 20 if they do",
            "--tolerance X": "with --first-difference: relative tolerance; 0 = bit for bit",
            "--json": "print all figures, seed by seed, as JSON",
        },
        (
            "rloo compare mine other",
            "rloo compare mine other --first-difference",
            "rloo compare runs --out comparison --metric eval_reward --unfinished",
        ),
        "RUN is a folder, a name under runs/, a folder with runs in it, or a pattern in quotes.",
    ),
    "verify-resume": Verb(
        "inspect",
        "check that a killed and resumed run equals an uninterrupted one",
        {NEW: KEYS},
        {
            "--steps N=6": "steps of each run",
            "--kill-in-step STEP": "kill the second run in this step's update (the last but one)",
            "--inside-save": "kill it inside its first save instead",
            "--tolerance X": "relative tolerance; 0 = bit for bit",
            "--keep": "keep the folders of both runs; they are always kept if the runs differ",
            "--json": "print the result as JSON",
        },
        (
            "rloo verify-resume +recipe=smoke",
            "rloo verify-resume +recipe=smoke --steps 4 --inside-save",
        ),
        "Both runs train in separate processes, in a temporary folder under root. If anything "
        "differs, it prints the first difference and exits with 20.",
    ),
    "record": Verb(
        "inspect",
        "seal a run into a folder that others can check: RUN; verify FOLDER",
        {NEW: "RUN", "verify": "FOLDER"},
        {
            "--out FOLDER": "the record's folder (RUN/record)",
            "--again": "also train the record's config with another seed, into runs/",
            "--seed N": "the seed of --again (the record's + 1)",
            "--json": "print the record, or what verify found, as JSON; logs go to stderr",
        },
        (
            "rloo record quickstart --out quickstart_record",
            "rloo record verify quickstart_record --again",
        ),
        "verify compares every file with its hash, then scores the recorded completions with the "
        "config's rewards. It exits with 20 if a file, a score or the second run does not hold.",
        flags_of={"verify": ("--again", "--seed")},
        needs={"--seed": ("--again",)},
    ),
    "slurm": Verb(
        "serve and scale",
        "turn a recipe into a Slurm job: render or submit [KIND] +recipe=NAME",
        {
            "render": "[KIND] [RUN] +recipe=NAME [key=value ...]",
            "submit": "[KIND] [RUN] +recipe=NAME [key=value ...]",
        },
        {"--json": "print the script, or the job id, as JSON", **CONFIG_DIR},
        (
            "rloo slurm render +recipe=quickstart slurm.time=1:00:00",
            "rloo slurm render sweep +recipe=quickstart algorithm.beta=0.01,0.05",
        ),
        "KIND: train, train_and_serve, sweep, or eval (which also takes a run's folder). render "
        "prints the script and needs no Slurm; submit runs sbatch.",
    ),
    "migrate": Verb(
        "tools",
        "turn a TRL or ms-swift command line or config into a recipe",
        {NEW: "COMMAND ..."},
        {
            "--world-size W": "number of processes of the old run, if its command does not say",
            "--from DIALECT": "tool and version of the old config (see below)",
            "--json": "print the recipe's text as JSON",
        },
        (
            "rloo migrate trl rloo --model_name_or_path M --dataset_name D > my.yaml",
            "rloo migrate --world-size 8 config.yaml > my.yaml",
        ),
        "COMMAND is the old command, or a file of its settings (.yaml, .json). --world-size and "
        "--from go before it, or after a file. DIALECT: rloo or grpo (TRL's), "
        "swift; or a version of TRL: trl_0_9 (<= 0.10), trl_0_21 (0.11 to 0.21), trl_0_28 (0.22 "
        "to 0.28), grpo_0_16 (0.14 to 0.16), grpo_0_28 (0.22 to 0.28); trl: RLOO or GRPO, by "
        "its settings.",
    ),
    "reward": Verb(
        "tools",
        "test a reward on right answers and exploits: list, test [REWARD] +recipe=NAME",
        {"list": "", "test": "[REWARD] +recipe=NAME [key=value ...]"},
        {
            "--rows N=8": "number of rows to test it on",
            "--against REWARD": "compare its ranking of completions with this reward's",
            "--json": "print all figures and every exploit found as JSON",
            **CONFIG_DIR,
        },
        (
            "rloo reward list",
            "rloo reward test mine.py:score +recipe=quickstart --rows 20",
            "rloo reward test length_chars +recipe=quickstart --against exact_match",
        ),
        "REWARD is file.py:function, a reward of the recipe or a choice of conf/reward; by default "
        "all rewards of the recipe. test exits with 20 if it finds an error or an exploit.",
        flags_of={"list": ("--config-dir",)},
    ),
    "docs": Verb(
        "tools",
        "print a page of the documentation, or list the pages",
        {NEW: "[PAGE]"},
        {"--json": "the page's text, or the titles of all pages, as JSON"},
        ("rloo docs rewards", "rloo docs inspect#guards"),
        "PAGE is a name of the list, or PAGE#SECTION. A pipe or a file gets the page as Markdown.",
    ),
    "completion": Verb(
        "tools",
        "print the shell's completion script: bash, zsh or fish",
        {NEW: "SHELL"},
        {"--json": "print the script as JSON"},
        ('eval "$(rloo completion bash)"', "rloo completion zsh > ~/.zfunc/_rloo"),
        "To keep it, add the line to your shell's start-up file, ~/.bashrc for bash.",
    ),
}
