"""What becomes of a checkpoint on other ranks, in other layouts and under other names."""
