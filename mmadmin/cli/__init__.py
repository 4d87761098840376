"""The `mm` command."""
