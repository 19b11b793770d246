"""The only importers of torch."""
