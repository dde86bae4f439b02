"""`python -m tvm_pipeline.cli`: the command line by this interpreter."""

from tvm_pipeline_command import main

main()
