"""The two trainings that come before RLOO: supervised fine-tuning, and a reward model.

examples      dataset rows -> SFT examples / preference pairs
fit           their training loop
reward_model  Bradley-Terry loss/objective
sft           SFT loss/objective
tldr          what is trained for the TL;DR miniature
worker        the process of both trainings
"""
