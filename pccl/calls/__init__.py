"""The calls of `Communicator`: what each takes, waits for and says, and what it leaves behind."""
