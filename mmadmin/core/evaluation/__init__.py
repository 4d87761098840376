"""Measured quality: what evaluations report, and how two of them are compared."""
