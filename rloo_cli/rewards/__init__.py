"""One file per reward, and the parts that call them.

A reward file has a docstring, `class Config(RewardConfig)` and `def score(...)` (or `async def`).
`score` declares the arguments it wants by name (arguments.KWARGS), plus `config`, plus `columns`
(every data column, one value per row). A reward that reads columns says which in
`needs(config) -> list[str]`; one that needs a package checks it in `preflight(config)`; one that
loads something does so in `ready(code, surroundings)`, before the policy's weights load; rules of
its own keys are `problems(config, where)`, what the log must say `notes(config, where)`. No reward
file imports torch at its top: the registry reads every schema without it.
"""

# Modules of this folder that are not rewards.
PARTS = (
    "arguments",
    "build",
    "cache",
    "columns",
    "failures",
    "harness",
    "mathematics",
    "math_gold",
    "math_worker",
    "outcomes",
    "reading",
    "ready",
    "running",
    "sandbox",
    "scoring",
    "text",
    "validate",
    "worker",
    "workers",
)
