"""The application that runs bundles on sources of frames, for weeks if need be.

settings.py         the options of a run
file.py             the options of a run, from a TOML file
running.py          Service: a run, from the bundles to the last record
model_bundle.py     the bundle of a model file, compiled into the cache
running_model.py    one model of a run: its pipeline, its sources, its results, what watches it
deadline_guard.py   what frames promise while they run: sources admitted, late frames counted, plans exchanged
model_plan.py       the plan by which a model begins, before or after it is measured
host_planning.py    the plan of a model with the host work around it
inputs.py           the sources of a run
changing_inputs.py  sources that come and go while a run waits for them
status_file.py      what other processes read of such a run
progress.py         how far each source has come, which outlives a process
listener.py         the object that hears of a run while it runs
records.py          events and figures as JSON
result_lines.py     what was found in a frame as a line of JSON, and its schema
log_files.py        files of JSON lines that several runs append to, and the numbers of segments
result_files.py     the files that lines and a video go to, in segments where requested
mqtt_results.py     lines as messages to an MQTT broker
home_assistant.py   sources as devices of Home Assistant, at that broker
control.py          a file that says what a running process plans for
supervisor.py       a parent that starts the run again after a crash
door.py             the host work around a model, for `compile` and `bench` of the engine
frigate.py          detections for Frigate, over ZeroMQ
inference.py        a running pipeline as a model of the Open Inference Protocol
inference_http.py   that protocol over HTTP
inference_grpc.py   that protocol over gRPC
shared_memory.py    arrays of its clients on this machine
video_extra.py      the parts of the video room that a service needs
"""
