"""Helpers of all layers: texts, addresses, and the log."""
