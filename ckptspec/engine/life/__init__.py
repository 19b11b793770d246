"""The life of a run folder: room, leases, retention, cleaning, going back."""
