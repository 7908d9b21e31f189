"""One file per reward; `engine/` has the code that calls them, `common/` what several share.

A reward file has a docstring, `class Config(RewardConfig)` and `def score(...)` (or `async def`).
`score` declares its arguments by name (engine.arguments.REWARD_KWARGS), plus `config`,
plus `columns` (every data column, one value per completion). A reward that reads columns lists them
in `needs(config) -> list[str]`; one that needs a package checks it in `preflight(config)`; one that
loads something does so in `ready(code, setup)`, before the policy's weights load. Requirements
beyond the package (an extra, a service) are in `EXTRA`, for `rloo reward list`. Rules for its
keys are in `problems(config, where)`, warnings for the log in `notes(config, where)`. No reward
file imports torch at its top: the registry reads every schema without it.
"""
