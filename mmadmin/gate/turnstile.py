"""The turnstile: who may go to the engine now, and who waits.

One a deployment, a pure state machine without clocks or tasks. It lets as many requests in as the
engine has slots; the others wait in one line a client key, and the lines take turns, so that a key
with a hundred requests delays another key by one. The number that may wait is bounded. On hold
(an activation swaps the engine) nobody is let in and nobody is turned away until the bound.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


class Full(Exception):
    """As many wait as may."""


class Ticket:
    """One request's place."""

    __slots__ = ("admit", "admitted", "key_id", "position")

    def __init__(self, key_id: str, admit: Callable[[], None]) -> None:
        self.key_id = key_id
        self.admit = admit
        """Called once, when its turn comes."""
        self.admitted = False
        self.position = 0
        """How many were ahead when it came, itself included; 0 = went straight in."""


class Turnstile:
    """The gate of one deployment."""

    __slots__ = ("_lines", "capacity", "limit", "open", "running", "waiting")

    def __init__(self, *, capacity: int, limit: int) -> None:
        self.capacity = capacity
        self.limit = limit
        self.open = True
        self.running = 0
        self.waiting = 0
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def try_pass(self) -> bool:
        """Go straight in when there is room and nobody waits."""
        if self.open and self.running < self.capacity and not self.waiting:
            self.running += 1
            return True
        return False

    def wait(self, ticket: Ticket) -> None:
        """Join the line; `Full` when it has no room."""
        if self.waiting >= self.limit:
            raise Full
        self._lines.setdefault(ticket.key_id, deque()).append(ticket)
        self.waiting += 1
        ticket.position = self.waiting

    def leave(self) -> None:
        """A request that was let in has ended."""
        self.running -= 1
        self.pump()

    def give_up(self, ticket: Ticket) -> None:
        """A request ended while it waited, or just after it was let in."""
        if ticket.admitted:
            self.leave()
            return
        line = self._lines[ticket.key_id]
        line.remove(ticket)
        if not line:
            del self._lines[ticket.key_id]
        self.waiting -= 1

    def pump(self) -> None:
        """Let in whoever fits, one from each key's line in turn."""
        while self.open and self.waiting and self.running < self.capacity:
            key_id, line = next(iter(self._lines.items()))
            ticket = line.popleft()
            if line:
                self._lines.move_to_end(key_id)
            else:
                del self._lines[key_id]
            self.waiting -= 1
            self.running += 1
            ticket.admitted = True
            ticket.admit()
