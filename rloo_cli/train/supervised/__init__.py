"""The two trainings that come before RLOO: supervised fine-tuning, and a reward model.

examples      rows to examples for fine-tuning, and to pairs of preferences
fit           their training loop
reward_model  the Bradley-Terry loss
sft           the loss of supervised fine-tuning
tldr          what is trained for the TL;DR miniature
worker        the process of both trainings
"""
