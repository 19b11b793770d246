"""Owns the ways into other people's training loops, each in a module of its own that imports their library."""
