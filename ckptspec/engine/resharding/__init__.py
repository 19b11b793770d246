"""Writing a checkpoint anew for another layout: read once, in bounded memory, and restartable."""
