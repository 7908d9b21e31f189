"""What several rewards share.

chat_client      questions to a chat model
http_client      JSON over HTTP, with retries
instructions     instructions that a program can verify
math_equal       mathematical equality, with a time limit
math_gold        gold answers and answers, parsed by math-verify
model_inputs     token ids for a reward model
sandbox          runs a model's programs in a sandbox
sandbox_harness  the program that runs inside the sandbox
text             completions as text
"""
