"""What all kinds of agents share.

build           the generator of episodes around the run's generator
call_parsers    the calls in a turn's text, for five ways to write them, and vLLM's own parsers
episode         one episode: its turns so far, and its limits
episode_sampler the base of every generator of episodes
episodes        many episodes at once: the `Generator` that a run samples with
observations    tool answers as the model sees them: texts and images
tool_calls      runs calls in processes, and turns their results into messages
tool_processes  where tools and environments run: worker processes, or threads
tool_set        the tools' descriptions, and checks of calls
tool_worker     what such a process runs
turn_rendering  a tool's answer as token ids
written_rules   the same by the template rules of the package renderers
"""
