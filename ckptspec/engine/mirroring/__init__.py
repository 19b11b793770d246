"""A second tier: copies of steps elsewhere, and the way back."""
