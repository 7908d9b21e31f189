"""The switches and the arithmetic that algorithms share."""
