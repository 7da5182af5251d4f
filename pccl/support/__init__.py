"""What all layers use and nobody comes for: words and numbers of addresses, and the log."""
