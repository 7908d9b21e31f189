"""What a batch script of `rloo slurm` asks the cluster for; a run itself reads none of it."""

from typing import Annotated

from pydantic import Field

from rloo_cli.config.key_types import Frozen, PathText, Positive, Text, key

# A plain number, sbatch's minutes, is refused: YAML reads 4:00:00 without quotes as 14400.
TIME = r"^(\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2})$"


class SlurmConfig(Frozen):
    """What a batch script asks Slurm for."""

    partition: Text | None = key("Partition; null = the cluster's default")
    account: Text | None = key("Account that is charged")
    qos: Text | None = key("Quality of service")
    time: Annotated[str, Field(pattern=TIME)] | None = key(
        "Time limit: 'HH:MM:SS' or 'D-HH:MM:SS', quoted in a file; null = the partition's"
    )
    exclusive: bool = key("Ask for whole nodes, with all their CPUs and memory")
    gpus_per_node: int | None = key(
        "GPUs on each node; null = one for each process and for each GPU of its server; 0 = none",
        ge=0,
    )
    cpus_per_gpu: Positive = key("CPUs for each GPU that is asked for, if cpus_per_task is null")
    mem_per_gpu_gb: Positive = key("GB of memory for each GPU that is asked for, if mem is null")
    cpus_per_task: Positive | None = key("CPUs on each node; null = cpus_per_gpu for each GPU")
    mem: Text | None = key(
        "Memory on each node, e.g. 200G; 0 = all; null = mem_per_gpu_gb for each GPU"
    )
    setup: list[Text] = key("Lines of shell before the run, such as 'module load cuda'")
    max_requeues: int = key("How often a job that was stopped and saved is requeued", ge=0)
    lead_s: Positive | None = key(
        "Seconds before the time limit at which a run is told to save; null = as measured: a step,"
        " a save and 60 more, or 300 where nothing was measured yet"
    )
    output: PathText | None = key("The job's log; null = root/slurm/NAME-JOB.log")
    options: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], Text | int | None] = key(
        "Further options of sbatch: {constraint: a100, mail-type: END}; null = without a value"
    )
