"""The application that runs bundles on sources of frames, for weeks if need be; and the steps to a bundle's plan.

workflow.py         from a model file to a plan, as one call each
machine_modes.py    the power modes of this machine, and being in one with permission
mode_profiles.py    a profile for each power mode, and a plan over these
merged.py           several models that run at one rate, planned as one graph
predicted.py        profiles of devices that are not plugged in, predicted from shapes
calibrating.py      models of a platform's devices, refitted to stages measured on those that are here
modelled.py         devices that plan from calibrated models, and are not measured
doubts.py           why figures may not be those of this machine
machine.py          the machine whose devices a model is compiled for: this one, or a board
compiling.py        a model compiled for a platform, with what is tried and left out
rewriting_trial.py  operators in parts, accepted where memory falls and outputs stay the same
engine_fallback.py  what TVM refuses, on an engine that takes it
tune_targets.py     faster kernels of a model for each target of a platform
tune_plan.py        faster kernels for what bounds the best plan, while it is planned anew
settings.py         the options of a run
option_names.py     their names on the command line and in files
file.py             the options of a run, from a TOML file
running.py          Service: a run, from the bundles to the last record
model_bundle.py     the bundle of a model file, compiled into the cache
running_model.py    one model of a run: its pipeline, its sources, its results
watched_model.py    its watcher over HTTP
timed_decoder.py    a decoder that tells how long it has been at its frame
waiting_model.py    the plan of a model that waits for sources, and the noise that warms it
host_planning.py    the plan of a model with the host work around it
inputs.py           the sources of a run
changing_inputs.py  sources that come and go while a run waits for them
status_file.py      what other processes read of such a run
progress.py         how far each source has come, which outlives a process
listener.py         the object that hears of a run while it runs
power_meter.py      the sensor of power that a command measures with
records.py          events and figures as JSON
result_lines.py     what was found in a frame as a line of JSON, and its schema
log_files.py        files of JSON lines that several runs append to, and the numbers of segments
result_files.py     the files that lines and a video go to, in segments where requested
mqtt_results.py     lines as messages to an MQTT broker
control.py          a file that says what a running process plans for
signals.py          the requests of signals
supervisor.py       a parent that starts the run again after a crash
video_extra.py      the parts of the video room that a service needs
"""
