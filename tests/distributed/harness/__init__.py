"""Tests of the test helpers: forked ranks and commands."""
