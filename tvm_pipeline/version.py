"""The version of this package, which bundles record and `tvm-pipeline --version` prints."""

__version__ = "0.1.0"
