"""Expected results, computed in numpy."""
