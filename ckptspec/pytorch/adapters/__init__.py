"""How objects in a state are opened as trees, and given back what a load found: one small module a kind of object."""
