"""Tests of the devices that compute in memory of their own."""
