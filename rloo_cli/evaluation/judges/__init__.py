"""Judges of held-out completions against reference texts or another model's, pair by pair.

An answer without a verdict is requested again; then the pair is counted as invalid and left out of
the rate, never decided for either side.

    judge     builds the judge of a config, and reports its verdicts
    llm       pairs judged by a language model
    pairs     pairs to be judged
    reward    pairs judged by a reward, which scores both texts
    win_rate  verdicts to wins, ties, losses, and the win rate with its interval
"""
