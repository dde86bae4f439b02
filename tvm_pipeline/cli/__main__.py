"""`python -m tvm_pipeline.cli`: the command line by this interpreter."""

from tvm_pipeline.cli import main

main()
