"""The command line: no logic."""
