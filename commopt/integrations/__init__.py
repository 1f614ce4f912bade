"""Doors of frameworks; nothing is imported before it is asked for."""
