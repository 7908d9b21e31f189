"""What all kinds of agents share.

build           the generator of episodes around the run's generator
call_parsers    the calls in a turn's text, for five ways to write them, and vLLM's own parsers
episode         one episode: its turns so far, and its limits
episode_sampler the base of every generator of episodes
episodes        many episodes at once: the `Generator` that a run samples with
observations    what was answered, as the model may be shown it: texts and images
template_rules  ids between two turns by the template rules of the package renderers
tool_calls      makes calls in processes, and words their answers
tool_processes  where tools and environments run: worker processes, or threads
tool_set        the tools' descriptions, and checks of calls
tool_worker     what such a process does
turn_rendering  what a tool answered, as ids
"""
