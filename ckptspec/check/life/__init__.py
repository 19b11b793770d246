"""Decisions about a run: how often to save, what to keep, what may go, whether there is room."""
