"""One file per reward; what calls them is in `engine/`, what they share in `common/`.

A reward file has a docstring, `class Config(RewardConfig)` and `def score(...)` (or `async def`).
`score` declares the arguments it wants by name (arguments.KWARGS), plus `config`, plus `columns`
(every data column, one value per row). A reward that reads columns says which in
`needs(config) -> list[str]`; one that needs a package checks it in `preflight(config)`; one that
loads something does so in `ready(code, surroundings)`, before the policy's weights load; rules of
its own keys are `problems(config, where)`, what the log must say `notes(config, where)`. No reward
file imports torch at its top: the registry reads every schema without it.
"""
