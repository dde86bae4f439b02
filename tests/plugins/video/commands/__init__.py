"""The commands `run` and `top`."""
