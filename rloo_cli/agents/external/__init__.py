"""Agents written by others, behind an OpenAI-shaped address (agent=proxy).

agent_guard    ends the agents of a run that was killed; a program by itself
agent_host     one process that plays all episodes, where the run has started one
agent_process  one agent's process: its environment, its last words, its end
conversation   an episode's messages against those of a request: what is new, as ids
generator      the `Generator` whose episodes agents play
message_forms  messages and requests as they come, in one form; refusals
request_queue  where agents' requests wait for the sampler
server         the HTTP server
wire_answers   answers in the shapes of chat completions and of responses, whole and in pieces
"""
