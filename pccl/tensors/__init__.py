"""Arrays as memory: where it is, how long, of which type and in which order."""
