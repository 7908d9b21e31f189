"""The verbs of the command line: what each is for, the words and the flags that it takes.

`verb_parser.py` makes one argparse parser of each entry: it reads the arguments, prints the help
and gives the shell its completion script. Imports nothing that is slow.
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
    exclusive: tuple[str, ...] = ()  # flags of which one at most is given
    needs: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # flag -> one of these is needed


GROUPS = ("train", "serve and scale", "inspect", "tools")  # in the order of the help
NEW = ""
KEYS = "+recipe=NAME [key=value ...]"
CONFIG_DIR = {"--config-dir DIR ..., -cd": "a folder with groups and recipes of your own"}
RESULT_AS_JSON = {"--json": "print the result as JSON; logs go to stderr"}
COMMON_FLAGS = {
    "--debug": "print tracebacks below an error",
    "--errors=json": "print errors as JSON, for tools",
    "--help, -h": "print this",
}
WORD_HELP = {  # what a word of the usage stands for
    "RUN": "a run's folder, or its name under runs/",
    "SWEEP": "a sweep's folder, or its name under runs/",
    "MEMBER": "a member's number, its name, or a part of it",
    "key=value": "keys with their values; +recipe=NAME or +recipe=my.yaml",
}

VERBS: dict[str, Verb] = {
    "train": Verb(
        "train",
        "train a policy",
        {NEW: "[+recipe=NAME] [key=value ...]"},
        {
            "--dry-run": "check everything, print the plan and the config, train nothing",
            "--json": "print the result as JSON (with --dry-run the plan); logs go to stderr",
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
        "+recipe is a name of `rloo recipes` or a file, +recipe=my.yaml. `rloo config` lists "
        "all keys. A run writes to root/name, runs/NAME as a rule; Ctrl-C saves it, and "
        "resume=auto goes on with it. --multirun returns logging.objective of each job to "
        "Hydra's sweeper.",
        needs={"--resolve": ("--cfg job",), "--package": ("--cfg job",)},
    ),
    "sweep": Verb(
        "train",
        "train several configurations on one device, interleaved: +recipe=NAME key=a,b",
        {
            NEW: "+recipe=NAME key=a,b ...",
            "show": "SWEEP",
            "resume": "SWEEP",
            "stop": "SWEEP MEMBER",
            "promote": "SWEEP MEMBER",
            "clone": "SWEEP MEMBER key=value ...",
        },
        {
            "--chunk N": "steps that a member trains before the next has its turn (10)",
            "--jobs N": "members that train at the same time (one on each GPU; 1 without)",
            "--name NAME": "the sweep's folder, root/NAME",
            "--keep N ...": "go on with the best N members only ...",
            "--at N ...": "... from this step on; --keep and --at may be repeated in pairs",
            "--by METRIC ...": "what they are ranked by (reward); METRIC:min = the lowest is best",
            "--dry-run": "check every member and list them, train nothing",
            "--multirun, -m": "accepted, and changes nothing",
            "--json": "the whole state of the sweep on stdout; what is for people on stderr",
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
        "fine-tune a model on completions, before RLOO",
        {NEW: KEYS},
        {"--json": "the model's folder and scores on stdout; all else on stderr", **CONFIG_DIR},
        ("rloo sft +recipe=tldr_mini", "rloo sft +recipe=tldr_mini sft.epochs=1 name=mine"),
        "The model is written to root/sft/NAME; model.path takes that folder.",
    ),
    "reward-model": Verb(
        "train",
        "train a reward model on preferences",
        {NEW: KEYS},
        {"--json": "the model's folder and scores on stdout; all else on stderr", **CONFIG_DIR},
        (
            "rloo reward-model +recipe=tldr_mini",
            "rloo reward-model +recipe=tldr_mini reward_model.epochs=1 name=mine",
        ),
        "The model is written to root/reward_model/NAME; reward.NAME.path takes that folder.",
    ),
    "vllm-serve": Verb(
        "serve and scale",
        "serve completions for a run from GPUs or a node of their own",
        {NEW: "+recipe=NAME | model.path=ORG/NAME [key=value ...]"},
        {"--json": "its address on stdout, once it answers; all else on stderr", **CONFIG_DIR},
        (
            "rloo vllm-serve +recipe=quickstart",
            "rloo vllm-serve +recipe=quickstart generation.server.port=8001",
            "rloo vllm-serve model.path=make:tiny name=a_server",
        ),
        "`rloo train` with the same overrides and generation=vllm_server finds the server. One "
        "without a recipe serves any run that names it: generation.server.base_url=URL.",
    ),
    "eval": Verb(
        "train",
        "score held-out data: RUN, RUN/checkpoint-N, or +recipe=NAME model.path=...",
        {NEW: "[RUN] [+recipe=NAME] [key=value ...]"},
        {"--json": "the metrics on stdout; all else on stderr", **CONFIG_DIR},
        (
            "rloo eval quickstart",
            "rloo eval runs/quickstart/checkpoint-50 eval.num_generations=8",
            "rloo eval +recipe=quickstart eval.max_samples=100",
        ),
        "Of a RUN its final model is evaluated, or else its newest checkpoint.",
    ),
    "fetch": Verb(
        "serve and scale",
        "download what a run needs: +recipe=NAME, for machines without network",
        {NEW: KEYS},
        {"--json": "each thing with its place on stdout; all else on stderr", **CONFIG_DIR},
        ("rloo fetch +recipe=quickstart", "rloo fetch +recipe=tldr_1b model.revision=main"),
    ),
    "plan": Verb(
        "serve and scale",
        "estimate memory, disk and time of a run: +recipe=NAME --gpu 80GiB",
        {NEW: KEYS},
        {
            "--gpu KIND": "the device: H100-80GB and others by name, 80GiB, or cpu",
            "--gpus N": "how many of them train",
            "--prompts N": "how many prompts the data has, for the number of steps",
            "--prompt-tokens N": "mean tokens of a prompt",
            "--completion-tokens N": "mean tokens of a completion",
            "--turns MEAN": "mean turns of an episode, with an agent",
            "--observation-tokens N": "mean tokens of what tools say between two turns",
            "--json": "bytes, seconds and counts, for tools",
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
        {"--json": "the same as data"},
        ("rloo recipes show quickstart", "rloo recipes copy quickstart my.yaml"),
    ),
    "config": Verb(
        "tools",
        "list every key; config explain KEY; config --json",
        {NEW: "[+recipe=NAME] [key=value ...]", "explain": "KEY [+recipe=NAME] [key=value ...]"},
        {
            "--json": "the JSON schema of a recipe, for editors; of a key: what is known of it",
            **CONFIG_DIR,
        },
        ("rloo config +recipe=quickstart", "rloo config explain algorithm.beta +recipe=quickstart"),
    ),
    "runs": Verb(
        "inspect",
        "list runs: state, age, steps, held-out score, size",
        {NEW: "[FOLDER]"},
        {"--json": "every run with all that the list knows of it"},
        ("rloo runs", "rloo runs runs/compare"),
        "FOLDER is runs/ if none is named; runs lie in it or up to two folders below. A run "
        "whose process is gone without having said so is `killed`.",
    ),
    "top": Verb(
        "inspect",
        "watch a run on a screen: phases, time left, speed, memory, sample, advice",
        {NEW: "[RUN]"},
        {
            "--once": "print one frame and end",
            "--json": "the values of the frame",
            "--every SECONDS=2": "between two looks at the files",
        },
        ("rloo top quickstart", "rloo top quickstart --once --json"),
        "Without a RUN: the run that was written last. Leaving never touches the run.",
    ),
    "doctor": Verb(
        "inspect",
        "before a run: what the machine lacks; after it: what went wrong, with the key to turn",
        {NEW: "[RUN] [+recipe=NAME] [key=value ...]"},
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
        "Before a run each line is ok, warn or fail, with the fix; exits with 3 where one is "
        "fail. For a RUN it reads files only, and exits with 20 where a pathology is found.",
    ),
    "report": Verb(
        "inspect",
        "write one HTML page that shows a run: curves, samples, seconds, memory",
        {NEW: "RUN"},
        {
            "--out FILE.html": "where to; RUN/report.html if it is left out",
            "--json": "the figures as data, and no page",
        },
        ("rloo report quickstart", "rloo report quickstart --out report.html"),
        "The page needs no network, and reads on a phone and in the dark.",
    ),
    "replay": Verb(
        "inspect",
        "compute a recorded step again; or say what another reward would have taught",
        {NEW: "RUN"},
        {
            "--step STEP": "the step; with --reward all recorded steps if it is left out",
            "--reward FILE.py:NAME": "score the recorded completions with it instead",
            "-n N=5": "with --reward: how many completions are shown whose advantage flips",
            "--tolerance X": "numbers this near are equal, below 1; 0 = bit for bit, as on one CPU",
            "--json": "the result as data",
        },
        (
            "rloo replay quickstart",
            "rloo replay quickstart --step 3",
            "rloo replay quickstart --reward new.py:score --step 3",
        ),
        "The run has recorded its rollouts (logging.rollouts_every=1), and is not changed. Exits "
        "with 20 where a step comes out differently.",
        exclusive=("--reward", "--tolerance"),
        needs={"--tolerance": ("--step N",)},
    ),
    "sync": Verb(
        "tools",
        "send all of a run's metrics to a tracker: RUN wandb",
        {NEW: "RUN TRACKER"},
        {
            "--project NAME": "instead of the run's logging.tracker_project",
            "--json": "how many lines were sent, and where they are",
        },
        ("rloo sync quickstart wandb", "rloo sync quickstart tensorboard --json"),
        "TRACKER is one of logging.trackers, such as tensorboard or wandb. It may be repeated.",
    ),
    "push": Verb(
        "tools",
        "send a run's model and its card to a hub, private unless told otherwise",
        {NEW: "RUN"},
        {
            "--repo ORG/NAME": "the repository; it is made if it is not there",
            "--public": "let everybody see it",
            "--checkpoint NAME": "a checkpoint of the run instead of final/",
            "--message TEXT=rloo push": "of the commit",
            "--revision BRANCH": "a branch, which is made if it is not there (the main one)",
            "--dataset NAME": "the data set's name on the hub, for the card",
            "--dry-run": "print the card and the files, send nothing",
            "--json": "the result as data",
        },
        ("rloo push quickstart --repo ORG/NAME", "rloo push quickstart --dry-run"),
        "The token is the hub's own (hf auth login, or HF_TOKEN). Repeat it as you like.",
    ),
    "samples": Verb(
        "inspect",
        "show what a run wrote: --step N --worst; --eval",
        {NEW: "RUN"},
        {
            "--step STEP": "samples of this step; else of the last step that has some",
            "--worst": "the worst first",
            "--best": "the best first",
            "--reward NAME": "with --worst or --best: sort by this reward, not by the score",
            "-n N=5": "how many",
            "--eval": "held-out samples instead",
            "--set NAME": "held-out samples of this set",
            "--json": "the whole samples, with all their fields",
        },
        ("rloo samples quickstart", "rloo samples runs/quickstart --step 40 --worst -n 20"),
        exclusive=("--worst", "--best"),
        needs={"--reward": ("--worst", "--best")},
    ),
    "ledger": Verb(
        "inspect",
        "show what became of every prompt of a run",
        {NEW: "RUN"},
        {"--json": "the sums, for tools"},
        ("rloo ledger quickstart", "rloo ledger runs/quickstart --json"),
    ),
    "compare": Verb(
        "inspect",
        "compare runs: curves, tables, which is better and how sure that is",
        {NEW: "RUN ..."},
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
    "verify-resume": Verb(
        "inspect",
        "prove that a killed run ends as one left alone: +recipe=NAME",
        {NEW: KEYS},
        {
            "--steps N=6": "steps of each run",
            "--kill-in-step STEP": "in whose update the second run is killed (the last but one)",
            "--inside-save": "kill it inside its first save instead",
            "--tolerance X": "numbers this near (relatively) are equal; 0 = bit for bit",
            "--keep": "keep the folders of both runs; they are kept where they differ",
            "--json": "the result as data",
        },
        (
            "rloo verify-resume +recipe=smoke",
            "rloo verify-resume +recipe=smoke --steps 4 --inside-save",
        ),
        "Both runs train in processes of their own, in a temporary folder under root. Exits "
        "with 20 where anything differs, and says what first.",
    ),
    "slurm": Verb(
        "serve and scale",
        "write a recipe as a batch job: render or submit [KIND] +recipe=NAME",
        {
            "render": "[KIND] [RUN] +recipe=NAME [key=value ...]",
            "submit": "[KIND] [RUN] +recipe=NAME [key=value ...]",
        },
        {"--json": "the script, or the job's number, as data", **CONFIG_DIR},
        (
            "rloo slurm render +recipe=quickstart slurm.time=1:00:00",
            "rloo slurm render sweep +recipe=quickstart algorithm.beta=0.01,0.05",
        ),
        "KIND: train, train_and_serve, sweep, or eval (which also takes a run's folder). render "
        "prints the script and needs no Slurm; submit sends it with sbatch.",
    ),
    "migrate": Verb(
        "tools",
        "turn a TRL or ms-swift command line or config into a recipe",
        {NEW: "COMMAND ..."},
        {
            "--world-size W": "processes that the old run had, where its command does not say",
            "--from DIALECT": "which tool and version it was written for (see below)",
            "--json": "the recipe's text as JSON",
        },
        (
            "rloo migrate trl rloo --model_name_or_path M --dataset_name D > my.yaml",
            "rloo migrate --world-size 8 config.yaml > my.yaml",
        ),
        "COMMAND is the old command itself, or a file of its settings (.yaml, .json); --world- "
        "size and --from stand before it, or behind a file. DIALECT: rloo or grpo (TRL's), "
        "swift; or a version of TRL: trl_0_9 (<= 0.10), trl_0_21 (0.11 to 0.21), trl_0_28 (0.22 "
        "to 0.28), grpo_0_16 (0.14 to 0.16), grpo_0_28 (0.22 to 0.28); trl: RLOO or GRPO as its "
        "settings say.",
    ),
    "reward": Verb(
        "tools",
        "try a reward on data and tricks: list, test [REWARD] +recipe=NAME",
        {"list": "", "test": "[REWARD] +recipe=NAME [key=value ...]"},
        {
            "--rows N=8": "rows of the data to try it on",
            "--against REWARD": "a second reward: do the two order completions alike?",
            "--json": "all figures, and every completion that could be exploited",
            **CONFIG_DIR,
        },
        (
            "rloo reward list",
            "rloo reward test mine.py:score +recipe=quickstart --rows 20",
            "rloo reward test length_chars +recipe=quickstart --against exact_match",
        ),
        "REWARD is file.py:function, a reward of the recipe or a choice of conf/reward; without "
        "one, all of the recipe's. test exits with 20 where it finds an error or an exploit.",
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
        {"--json": "the script as JSON"},
        ('eval "$(rloo completion bash)"', "rloo completion zsh > ~/.zfunc/_rloo"),
        "To keep it, put the line for your shell into its start-up file, ~/.bashrc for bash.",
    ),
}
