"""A peer: its link to the master, its lane engine, and the calls that its threads make."""
