"""The pages, one module a subject.

They read through `queries`, write through `actions`, and decide nothing: whoever may not do a
thing is refused there, with the same message as in the API.
"""
