"""The master: its sockets, its journal, and the threads that serve them."""
