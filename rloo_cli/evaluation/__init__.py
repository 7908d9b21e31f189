"""Held-out scores and judges."""
