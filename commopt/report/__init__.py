"""Runs side by side: what they learned, and what that cost (the command ``commopt report``)."""
