"""rloo: train language models with REINFORCE leave-one-out (arXiv 2402.14740), from config."""

__version__ = "0.2.0"
