"""From a checked config to running processes: the run's folder, ranks, nodes, servers, sweeps."""
