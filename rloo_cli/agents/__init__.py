"""Tools and environments: a completion becomes an episode of several turns.

A kind of agent is a file here with a class `Config` and a function `load_tools(config)`, which
imports the user's code, describes its tools, and names what a tool process imports. A kind that
drives its own episodes has `build_generator` beside it. The episodes themselves are in `common/`:
an `EpisodeGenerator` is a `Generator` around the run's own, so no other room has to know about
turns.

    tools      Python functions
    proxy      external agents, behind an OpenAI-compatible endpoint
    class_     environments: classes whose public methods are tools (agent=class)
    rollout    a user function that plays the episodes
    common/    the tools' descriptions, parsers of calls, rendering, the episodes
    external/  the proxy: its server, the agents' processes, their conversations
    rollout_function/ the sampler for the function of agent=rollout, and checks of its rows
"""
