"""Data and models that the project makes itself, or takes from the package index: make:NAME.

addition    Two-digit addition, one token per character
chat_tasks  Arithmetic asked in words, and instructions that a program can verify
gguf        GGUF files as ordinary model folders
pictures    Pictures of coloured squares, and noise
shallow     Models of ours with some layers left out, for distillation
smollm2     SmolLM2-135M-Instruct, a real chat model, from the package index
text_games  Games of TextWorld, made from seeds
tiny        A random model, a byte tokenizer and a few prompts
tool_model  Tiny models that know how a tool is called
tool_tasks  Products that need a calculator, and a guessing game
tldr        The TL;DR pipeline in miniature, made here
tldr_models    its supervised model, preferences and reward model
tldr_posts  the posts, and the hidden rule that says how good a summary is
tldr_training  the loop that trains its models
vision_model  A tiny vision-language model that answers with any colour
"""
