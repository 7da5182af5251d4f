"""The library for C programs: its header, and what it takes to compile and to link them."""
