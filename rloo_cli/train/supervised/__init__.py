"""The two trainings before RLOO: supervised fine-tuning, and a reward model.

examples      read examples for fine-tuning, and preference pairs
fit           their training loop
parallel      how it is spread over ranks, by a run's engines
reward_model  the Bradley-Terry loss
sft           the loss of supervised fine-tuning
tldr          what is trained for the TL;DR miniature
worker        the process of both trainings
"""
