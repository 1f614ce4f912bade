"""Doors for other people's trainers; one module for each, which imports its framework. Nothing is imported before it is
asked for."""
