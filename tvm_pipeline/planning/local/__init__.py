"""Local search for plans of graphs whose downsets are too many to list, and bounds of all plans of such graphs."""
