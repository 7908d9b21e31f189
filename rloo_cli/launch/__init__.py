"""From a checked config to running processes: the run's folder, ranks, nodes, servers, sweeps.

launcher        check, make the run folder, start it, watch it, say how it ended
nodes           the handshake of several launchers on several nodes
preflight       what this machine lacks, told before anything starts
processes       starts and watches the processes of the ranks; signals, exit code
rollout_server  start, watch and stop a rollout server process
sweep/          the sweep behind rloo sweep
topology        ranks, nodes and where they meet, from Slurm or torchrun
"""
