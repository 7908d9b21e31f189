"""Data and models that the project makes itself: no download."""
