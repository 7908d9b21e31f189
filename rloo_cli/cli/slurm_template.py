"""Fills one of the batch scripts of scripts/slurm from a recipe's config.

The result can be passed to `sbatch` directly: the options at its head are replaced, and the line
`#rloo: words` is replaced by the run's overrides.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.reporting.metrics_lines import read_metrics_lines
from rloo_cli.utils import paths
from rloo_cli.utils.files import read_json

SLURM_JOB_KINDS = ("train", "train_and_serve", "sweep", "eval")
ARGUMENTS_MARK = "#rloo: words"
DEFAULT_LEAD_S = 300  # without measurements: steps and saves of large models take minutes
SIGNAL_MARGIN_S = 60  # the manual's allowance for a signal that comes early or late


@dataclass(frozen=True)
class SlurmJob:
    """A recipe as a batch job."""

    kind: str
    config: RunConfig
    subject: str  # the script's first argument: a recipe, or the evaluation target
    overrides: Sequence[str]  # its further words
    sweep_lines: Sequence[str] = ()  # of a sweep: the arguments of each run

    @property
    def serving_nodes(self) -> int:
        """Nodes that serve."""
        if self.kind != "train_and_serve":
            return 0
        server: Any = getattr(self.config.generation, "server", None)
        return max(1, server.num_nodes if server is not None else 1)

    @property
    def nodes(self) -> int:
        """All its nodes."""
        alone = self.kind in ("sweep", "eval")
        return self.serving_nodes + (1 if alone else self.config.distributed.num_nodes)

    @property
    def gpus(self) -> int | None:
        """GPUs to request per node; None = none."""
        asked = self.config.slurm.gpus_per_node
        return self.used_gpus if asked is None else asked or None

    @property
    def used_gpus(self) -> int:
        """GPUs of a node that the run's processes and its server use."""
        spread = self.config.distributed
        ours = 1 if spread.engine == "single" else spread.num_processes or 1
        if self.serving_nodes:  # all nodes request the same number
            ours = max(ours, device_count.gpus_per_server(self.config.generation))
        else:
            ours += device_count.local_server_gpus(self.config.generation)
        return ours

    @property
    def cpus(self) -> int | None:
        """CPUs to request per node; None = the cluster's default, or all of a node."""
        asked = self.config.slurm
        if asked.cpus_per_task is not None or asked.exclusive or self.gpus is None:
            return asked.cpus_per_task
        return asked.cpus_per_gpu * self.gpus

    @property
    def memory(self) -> str | None:
        """Memory to request per node; None = the cluster's default."""
        asked = self.config.slurm
        if asked.mem is not None or asked.exclusive:
            return asked.mem or "0"
        return None if self.gpus is None else f"{asked.mem_per_gpu_gb * self.gpus}G"

    @property
    def lead_s(self) -> int:
        """Seconds from the early warning to the time limit."""
        return self.config.slurm.lead_s or measured_lead_s(self.folder) or DEFAULT_LEAD_S

    @property
    def folder(self) -> Path:
        """The run's."""
        return Path(self.config.root, str(self.config.name))

    @property
    def log(self) -> str:
        """The job's log file, as sbatch's pattern."""
        plain = f"{self.config.root}/slurm/%x-{'%A_%a' if self.kind == 'sweep' else '%j'}.log"
        return self.config.slurm.output or plain


def measured_lead_s(folder: Path) -> int | None:
    """Seconds that a save and the slowest recent step took in an earlier run, plus a margin.

    None without an earlier run. Raises ConfigError if its files cannot be read.
    """
    save, file = read_json(folder / "run.json").get("save_seconds"), folder / "metrics.jsonl"
    if not isinstance(save, int | float) or not file.is_file():
        return None
    times = [line.get("step_time") for line in read_metrics_lines(file)[-50:]]
    steps = [seconds for seconds in times if isinstance(seconds, int | float)]
    return int(max(steps) + save + SIGNAL_MARGIN_S) + 1 if steps else None


def fill_batch_script(job: SlurmJob) -> str:
    """The whole script."""
    lines = Path(paths.SLURM, f"{job.kind}.sbatch").read_text().splitlines()
    own = [line for line in lines if not re.match("#SBATCH ", line)]
    head = lines.index(next(line for line in lines if line.startswith("#SBATCH ")))
    kept = [*own[:head], *[f"#SBATCH {option}" for option in sbatch_options(job)], *own[head:]]
    at = kept.index(ARGUMENTS_MARK)
    requeues = f"max_requeues={job.config.slurm.max_requeues}"
    own = [*job.config.slurm.setup, requeues, *_argument_lines(job)]
    return "\n".join([*kept[:at], *own, *kept[at + 1 :]]) + "\n"


def sbatch_options(job: SlurmJob) -> list[str]:
    """sbatch options: rloo's defaults, then the config's."""
    asked = job.config.slurm
    given: list[tuple[str, object]] = [
        ("job-name", job.config.name),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("partition", asked.partition),
        ("account", asked.account),
        ("qos", asked.qos),
        ("time", asked.time),
        ("gpus-per-node", job.gpus),
        ("cpus-per-task", job.cpus),
        ("mem", job.memory),
        ("array", f"1-{len(job.sweep_lines)}" if job.kind == "sweep" else None),
        ("output", job.log),
        ("open-mode", "append"),
        ("signal", f"USR1@{job.lead_s}"),
    ]
    found = [f"--{name}={_quoted(value)}" for name, value in given if value is not None]
    more = [f"--{n}" if v is None else f"--{n}={_quoted(v)}" for n, v in asked.options.items()]
    return [*found, "--requeue", *["--exclusive"] * asked.exclusive, *more]


def _quoted(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text else text


def _argument_lines(job: SlurmJob) -> list[str]:
    """The lines that set the script's arguments; further arguments of sbatch follow them."""
    words = [job.subject]
    lines: list[str] = []
    if job.kind == "train_and_serve":
        lines.append(f"RLOO_SERVE_NODES={job.serving_nodes}")
    if job.kind == "sweep":
        runs = " ".join(map(shlex.quote, job.sweep_lines))
        lines += ["runs=$(mktemp)", "trap 'rm -f \"$runs\"' EXIT"]
        lines.append(f"printf '%s\\n' {runs} >\"$runs\"")
    quoted = [*map(shlex.quote, words), *['"$runs"'] * (job.kind == "sweep")]
    quoted += map(shlex.quote, job.overrides)
    return [*lines, f'set -- {" ".join(quoted)} "$@"']
