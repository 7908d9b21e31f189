"""Trains several configurations of one experiment side by side: the sweep behind `rloo sweep`.

Each trial is an ordinary run, started as a user would start it. A socket sends it the step at which
its next time slice ends (`utils.sweep_time_slices`). Imports no torch.

    commands     requests from another terminal to a running sweep
    rules        what a sweep refuses
    running      the state of a running sweep
    scheduler    the loop of a sweep
    state        sweep.json: trials, settings, rungs
    table        the display of a sweep
    time_slices  which trial runs next; early stopping at rungs
    trial        one trial's process, and its share of the time
"""
