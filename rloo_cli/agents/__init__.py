"""Tools and environments: a completion becomes an episode of several turns.

A kind of agent is a file here with a class `Config` and a function `load_tools(config)`, which
imports the user's code, describes its tools, and names what a tool process imports. One whose
episodes are driven by an agent of its own has `build_generator` beside it. The other episodes
themselves are in `common/`: an `EpisodeGenerator` is a `Generator` around the run's own, so that
nothing below and nothing above it knows of turns.

    tools      Python functions
    proxy      agents written by others, behind an OpenAI-shaped address
    class_     environments: classes whose public methods are tools (agent=class)
    rollout    a function of the user's that plays the episodes
    common/    the tools' descriptions, parsers of calls, rendering, the episodes
    external/  the proxy: its server, the agents' processes, their conversations
    rollout_function/ what the function of agent=rollout samples with, and checks of its rows
"""
