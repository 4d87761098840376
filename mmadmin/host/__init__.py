"""The hands on a machine: download, run, supervise, probe. No Django, no Celery."""
