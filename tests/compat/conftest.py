"""Fixtures of this room's tests."""

from migrate_cases import migrate

__all__ = ["migrate"]
