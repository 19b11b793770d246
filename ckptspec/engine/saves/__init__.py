"""A save: what ranks declare, write and hand in, and the moment it becomes visible."""
