"""What to move: pure functions on documents."""
