"""Saving a run, and going on from what was saved."""
