"""Who wins: held-out completions against reference texts or another model's, pair by pair.

`judge` has what the evaluations call; `pairs` makes the pairs, `asked` has them judged by a
language model, `scored` by a reward of ours, `tally` counts. A verdict that is none is asked for
again, then the pair is counted as invalid and left out of the rate, never given to either side.

    judge     What evaluations call
    llm       Pairs judged by a language model
    pairs     Pairs to be judged
    reward    pairs judged by a reward, which scores both texts
    win_rate  verdicts to wins, ties, losses, and the win rate with its interval
"""
