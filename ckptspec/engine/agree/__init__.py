"""What the ranks of a job say to each other in one save or load, and what each may conclude."""
