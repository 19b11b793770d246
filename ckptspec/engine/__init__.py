"""Movement: writing, committing, agreeing, reading, verifying."""
