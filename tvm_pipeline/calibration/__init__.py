"""Calibrate the model of a device: measure some stages on it, and refit the model's constants to them.

stage_time.py     a stage of a network with its measured seconds, as the fit takes it
constants.py      the constants of a model by name, and how far they are thought to be from the shipped ones
shipped.py        the models with which a calibration begins
posterior.py      the most probable constants given some stages, and what is known of them
fit.py            a refitted model with its error on stages that were left out
stage_choice.py   which stages to measure, and what further measurements would tell
measuring.py      stages measured on one device, and the model that they give
stage_profile.py  the profile of a device that tells no times of operators, from such stages
"""
