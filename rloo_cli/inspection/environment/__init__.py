"""Checks the machine and an experiment before a run: `rloo doctor [+recipe=NAME]`.

Imports torch only in `trial_calls` (--deep). Changes nothing, downloads nothing.

    check_lines         a line: ok, warn or fail, the result, the fix
    experiment          memory, disk, ports, network, folder and servers of a run
    experiment_data     rows and columns of its data; its rewards' signatures
    gpu_holders         GPUs and the processes that hold their memory
    installed_packages  Python and packages against ranges and floors
    machine_state       devices, memory, network, Slurm, compilers, bubblewrap
    trial_calls         --deep: prompts tokenized, rewards called on two rows
"""

from rloo_cli.config.rules_paths import named_paths
from rloo_cli.config.schema import RunConfig
from rloo_cli.inspection.environment import (
    experiment,
    experiment_data,
    installed_packages,
    machine_state,
)
from rloo_cli.inspection.environment.check_lines import CheckLine, CheckLines


def inspect_environment(run: RunConfig | None = None, deep: bool = False) -> list[CheckLine]:
    """Check this machine, and a run's config on it. -> a line per check

    `deep`: tokenize prompts and call every reward too, which imports torch.
    """
    lines = CheckLines()
    installed_packages.check_python_packages(lines)
    if run is None:
        _inspect_machine(lines)
    else:
        _inspect_experiment(lines, run, deep)
    return lines.lines


def _inspect_machine(lines: CheckLines) -> None:
    installed_packages.check_vllm_version(lines)
    machine_state.check_devices(lines)
    machine_state.check_free_memory(lines)
    machine_state.check_disks(lines)
    machine_state.check_cache_folder(lines)
    machine_state.check_network(lines)
    machine_state.check_slurm(lines)
    machine_state.check_bubblewrap(lines)


def _inspect_experiment(lines: CheckLines, run: RunConfig, deep: bool) -> None:
    gpus = machine_state.check_devices(lines)
    experiment.check_machine_lacks(lines, run)
    if "vllm" not in [line.name for line in lines.lines]:
        installed_packages.check_vllm_version(lines)
    builders = {
        "DeepSpeed": run.distributed.engine.startswith("zero"),
        "vLLM": run.generation.is_engine,
        "train.compile": run.train.compile,
    }
    machine_state.check_compilers(lines, [name for name, builds in builders.items() if builds])
    machine_state.check_slurm(lines)
    experiment.check_run_folder(lines, run)
    experiment.check_run_network(lines, named_paths(run))
    experiment.check_model_files(lines, run.model)
    plan = experiment.check_run_memory(lines, run, gpus)
    experiment.check_run_disk(lines, run.root, run.checkpoint, plan)
    experiment.check_asked_ports(lines, run.folder, run.generation, run.distributed.rdzv)
    experiment.check_rollout_servers(lines, run.folder, run.generation)
    experiment.check_teacher_server(lines, run.algorithm.teacher_server)
    opened = experiment_data.check_data_rows(lines, run)
    rewards = experiment_data.check_reward_signatures(lines, run, opened)
    if deep:
        from rloo_cli.inspection.environment import trial_calls  # lazy: it imports torch

        trial_calls.try_prompts_and_rewards(lines, run, opened, rewards)
