"""Tests of the guests in plugins/; the tests beside this folder pass without the guests."""
