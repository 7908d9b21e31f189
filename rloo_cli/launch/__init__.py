"""From a checked config to running processes: the run's folder, ranks, nodes, servers, sweeps.

launcher        check, create the run folder, start, watch, report the end
local_ranks     the processes of rloo eval, sft and reward-model: ranks of one machine
leftovers       find and kill a run's leftover processes
nodes           the handshake of launchers on several nodes
preflight       what this machine lacks, checked before the start
processes       start and watch the processes of the ranks; signals, exit code
rollout_server  start, watch and stop a rollout server's process
sweep/          the sweep behind rloo sweep
topology        ranks, nodes and the store's address, from Slurm or torchrun
"""
