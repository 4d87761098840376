"""A plug-in: an engine, a model format and two recipes of another distribution.

The tests put the folder above on `PYTHONPATH`, which is all that an installation of it does. The page
`docs/engines/writing-an-engine.md` was followed to write it.
"""
