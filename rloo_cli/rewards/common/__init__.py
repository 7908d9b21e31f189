"""What several rewards share.

chat_client      questions to a chat model
http_client      JSON over HTTP, with retries
math_equal       mathematical equality, in a process with a deadline
math_gold        gold and answer as math-verify reads them
math_worker      that process
model_inputs     what a reward model is fed
sandbox          run programs of a model, contained
sandbox_harness  what runs inside
text             completions as text
"""
