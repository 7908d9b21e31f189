"""Keys of a job on a cluster: what `rloo slurm` writes into a batch script.

Null leaves out the script's line, and the cluster's own default holds. A run itself reads none of
these; nodes and processes are `distributed`'s and `generation.server`'s.
"""

from typing import Annotated

from pydantic import Field

from rloo_cli.config.schema_keys import Frozen, Positive, Text, key

# Not sbatch's plain minutes: YAML reads 4:00:00 without quotes as the number 14400.
TIME = r"^(\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2})$"


class SlurmConfig(Frozen):
    """What a batch script asks Slurm for."""

    partition: Text | None = key("Partition; null = the cluster's default")
    account: Text | None = key("Account that is charged")
    qos: Text | None = key("Quality of service")
    time: Annotated[str, Field(pattern=TIME)] | None = key(
        "Time limit: 'HH:MM:SS', 'D-HH:MM:SS', in a file with its quotes; null = the partition's"
    )
    exclusive: bool = key("Whole nodes, with all their processors, memory and GPUs")
    gpus_per_node: int | None = key(
        "GPUs on each node; null = distributed.num_processes, or whatever a whole node has", ge=0
    )
    cpus_per_task: Positive | None = key("Processors for each node's launcher and its processes")
    mem: Text | None = key("Memory on each node, e.g. 200G; 0 = all")
    lead_s: Positive | None = key(
        "Seconds before the time limit at which a run is told to save; null = as measured: a step,"
        " a save and 60, or 300 where nothing was measured yet"
    )
    output: Text | None = key("The job's log; null = root/slurm/NAME-JOB.log")
    options: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], Text | int | None] = key(
        "More of sbatch's options: {constraint: a100, mail-type: END}; null = without a value"
    )
