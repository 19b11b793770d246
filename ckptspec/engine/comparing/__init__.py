"""The difference of two checkpoints, whatever their layouts."""
