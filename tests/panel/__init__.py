"""Tests of the panel."""

PASSWORD = "a long enough password"
"""Of everybody in the seeded team."""
