"""Sampling with the trained transformers model itself."""
