"""Who wins: held-out completions against reference texts or another model's, pair by pair.

`judge` has what the evaluations call; `pairs` makes the pairs, `asked` has them judged by a
language model, `scored` by a reward of ours, `tally` counts. A verdict that is none is asked for
again, then the pair is counted as invalid and left out of the rate, never given to either side.

    judge     What evaluations call
    llm       Pairs judged by a language model
    pairs     Pairs to be judged
    reward    Pairs judged by a reward of ours, which scores both texts as it scores any completion
    win_rate  Verdicts of pairs -> wins, ties, losses, the rate with its interval, the rate at equal
"""
