"""Calibrate the model of a device: measure some stages on it, and refit the model's constants to them.

stage_time.py  a stage of a network with its measured seconds, as the fit takes it
"""
