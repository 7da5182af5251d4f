"""Whole runs in one process, without I/O, each from one seed; and a master alone."""
