"""The two trainings that come before RLOO: supervised fine-tuning, and a reward model."""
