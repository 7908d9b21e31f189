"""The two trainings before RLOO: supervised fine-tuning, and a reward model, by TRL's trainers.

rows          read examples for fine-tuning, and preference pairs
trainers      TRL's trainers with our keys, metrics and stopping rules
worker        the process of both trainings
"""
