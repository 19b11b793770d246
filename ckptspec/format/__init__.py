"""Values and codecs of the format: no I/O."""
