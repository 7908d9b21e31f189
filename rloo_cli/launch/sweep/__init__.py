"""Trains several configurations of one experiment side by side: the sweep behind `rloo sweep`.

Each trial is an ordinary run, started as a user would start it, with a socket on which it is told
when to go on (`utils.sweep_time_slices`). Imports no torch.

    commands     requests of another terminal to a sweep
    rules        what a sweep cannot do
    running      the state of a sweep that runs
    scheduler    the loop of a sweep
    state        sweep.json: trials, settings, rungs
    table        how a sweep is shown
    time_slices  which trial goes on next; early stopping at rungs
    trial        one trial's process, and its share of the time
"""
