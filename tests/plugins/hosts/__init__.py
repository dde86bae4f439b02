"""Tests of tvm_pipeline_hosts, and what they share: fleets, hosts that run nothing, and fleets on this machine."""
