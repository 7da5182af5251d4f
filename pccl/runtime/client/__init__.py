"""A peer: its connection to the master, its lane engine, and the calls that its threads make."""
