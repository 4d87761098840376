"""Measurements that are shown, not claimed: each prints a table and ends with one line."""
