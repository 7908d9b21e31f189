"""External agents, behind an OpenAI-compatible endpoint (agent=proxy).

agent_guard    ends the agents of a killed run; a standalone program
agent_host     the one process that plays all episodes, if the run starts one
agent_process  one agent's process: its environment, its last output, its end
conversation   matches a request against an episode's messages: what is new, as ids
generator      the `Generator` whose episodes agents play
message_forms  messages and requests in one common form; refusals
request_queue  where agents' requests wait for the sampler
server         the HTTP server
wire_answers   responses as chat completions or as responses, whole or streamed
"""
