"""From a checked config to running processes: the run's folder, ranks, nodes, servers, sweeps.

launcher        check, make the run folder, start it, watch it, say how it ended
local_ranks     the processes of rloo eval, sft and reward-model: ranks of one machine
leftovers       find and end what a run has left running
nodes           the handshake of launchers on several nodes
preflight       what this machine lacks, found before anything starts
processes       start and watch the processes of the ranks; signals, exit code
rollout_server  start, watch and stop a rollout server's process
sweep/          the sweep behind rloo sweep
topology        ranks, nodes and the store's address, from Slurm or torchrun
"""
