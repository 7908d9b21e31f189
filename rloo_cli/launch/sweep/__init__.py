"""Several configurations of one experiment side by side: the sweep behind `rloo sweep`.

Each member is an ordinary run, started as a user would start it, with a line (`turns`) on which it
is told when to go on. `book` is what the sweep's folder says, `control` the loop that gives turns,
`live` one member's process, `fair` whose turn it is, `rungs` early stopping, `asking` how another
terminal speaks to it, `rules` what is refused, `table` what is shown. Imports no torch.

    commands   what another terminal may ask of a sweep
    member     one member's process, and its share of turns
    rules      what a sweep cannot do
    running    the state of a sweep that runs
    scheduler  the loop of a sweep
    state      sweep.json: members, settings, rungs
    table      what is shown of a sweep
    turns      who goes on next; early stopping at rungs
"""
