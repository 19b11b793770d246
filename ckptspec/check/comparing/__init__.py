"""What two checkpoints differ in, from their documents."""
