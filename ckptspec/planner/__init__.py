"""What moves where: pure functions on documents."""
