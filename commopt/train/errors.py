"""Errors a user can fix. The command line prints them as one line; a traceback is for bugs only."""

from __future__ import annotations


class UserError(Exception):
    """Base of every error that names something the user can change. One message, one line."""


class ConfigError(UserError, ValueError):
    """A config key, value or combination that is not allowed."""


class DataError(UserError, ValueError):
    """A corpus that is missing, unreadable, empty or too small."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that is missing, damaged, foreign, or of another model, optimizer or corpus."""


class RankError(UserError, RuntimeError):
    """Another rank failed with an unexpected error; its own traceback is in that rank's output."""
