"""What is true: derivations, store, planner, builder, recipes, engines.

Pure Python. Nothing here imports Django, Celery, a web server or client, or any other room;
what touches the world is given in as a `Toolbox` (see `mmadmin.core.build.recipe`).
"""
