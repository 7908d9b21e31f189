"""What a batch script of `rloo slurm` requests; a run itself ignores these keys."""

from typing import Annotated

from pydantic import Field

from rloo_cli.config.key_types import Frozen, PathText, Positive, Text, key

# A plain number (minutes for sbatch) is refused: YAML reads unquoted 4:00:00 as 14400.
TIME = r"^(\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2})$"


class SlurmConfig(Frozen):
    """Slurm resources of a batch script."""

    partition: Text | None = key("Partition; null = the cluster's default")
    account: Text | None = key("Account to charge")
    qos: Text | None = key("Quality of service")
    time: Annotated[str, Field(pattern=TIME)] | None = key(
        "Time limit: 'HH:MM:SS' or 'D-HH:MM:SS', quoted in a file; null = the partition's"
    )
    exclusive: bool = key("Request whole nodes, with all their CPUs and memory")
    gpus_per_node: int | None = key(
        "GPUs on each node; null = one per process, plus its server's GPUs; 0 = none",
        ge=0,
    )
    cpus_per_gpu: Positive = key("CPUs per requested GPU, if cpus_per_task is null")
    mem_per_gpu_gb: Positive = key("GB of memory per requested GPU, if mem is null")
    cpus_per_task: Positive | None = key("CPUs on each node; null = cpus_per_gpu per GPU")
    mem: Text | None = key("Memory on each node, e.g. 200G; 0 = all; null = mem_per_gpu_gb per GPU")
    setup: list[Text] = key("Shell lines to run before the run, such as 'module load cuda'")
    max_requeues: int = key("Most times that a stopped and saved job is requeued", ge=0)
    lead_s: Positive | None = key(
        "Seconds before the time limit at which the run saves; null = from measurements: a step,"
        " a save and 60 more, or 300 without measurements"
    )
    output: PathText | None = key("The job's log; null = root/slurm/NAME-JOB.log")
    options: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], Text | int | None] = key(
        "Further sbatch options: {constraint: a100, mail-type: END}; null = no value"
    )
