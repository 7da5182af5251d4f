"""The library for C programs, with its header and compiler flags."""
