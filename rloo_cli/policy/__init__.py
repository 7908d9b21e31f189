"""The model: loading it, and log-probabilities of completions under it."""
