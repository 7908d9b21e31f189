"""Tools and environments: a completion becomes an episode of several turns.

A kind of agent is a file here with a class `Config` and a function `load_tools(config)`, which
imports the user's code, describes its tools, and names what a tool process imports. The episodes
themselves are in `common/`: an `EpisodeGenerator` is a `Generator` around the run's own, so that
nothing below and nothing above it knows of turns.

    tools      Python functions
    class_     environments: classes whose public methods are tools (agent=class)
    http       environments of a server of the user's own
    openenv    environments of an OpenEnv server
    common/    the tools' descriptions, parsers of calls, rendering, the episodes
    processes/ where tools and environments run
    remote/    sessions at servers of environments
"""
