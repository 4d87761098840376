"""The panel as the browser's tests run it: pages are told by events alone.

The real one also looks again every few seconds for what nobody announces. A test that wants to see
an event arrive would have to be quicker than that.
"""

from importlib import import_module

from mmadmin.asgi import application

__all__ = ["application"]

stream = import_module("deployments.views.stream")  # Django was set up above
stream.LOOK_AGAIN_S = 3600.0  # type: ignore[attr-defined]
