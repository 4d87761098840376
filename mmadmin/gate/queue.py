"""The queue of one deployment: which request may go to the engine now, and which waits.

A pure state machine without clocks or tasks. It admits requests up to the engine's slots; a request
for several answers takes several. The others wait, first in first out per client key, and the keys
take turns, so a key with a hundred requests delays another key by one. The number of waiting
requests is bounded. While a deployment is on hold (an activation swaps the engine), nothing is
admitted, and nothing is refused up to that bound.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


class QueueFull(Exception):
    """No more requests may wait."""


class Place:
    """One request's place in the queue."""

    __slots__ = ("admit", "admitted", "key_id", "position", "slots")

    def __init__(self, key_id: str, admit: Callable[[], None], slots: int = 1) -> None:
        self.key_id = key_id
        self.slots = slots
        self.admit = admit
        """Called once, when it is admitted."""
        self.admitted = False
        self.position = 0
        """Position on arrival, counted from 1; 0 = admitted without waiting."""


class Queue:
    """The requests of one deployment: running and waiting."""

    __slots__ = ("_by_key", "capacity", "limit", "open", "running", "waiting")

    def __init__(self, *, capacity: int, limit: int) -> None:
        self.capacity = capacity
        """Slots."""
        self.limit = limit
        """Requests that may wait."""
        self.open = True
        self.running = 0
        """Slots that are taken."""
        self.waiting = 0
        """Requests that wait."""
        self._by_key: OrderedDict[str, deque[Place]] = OrderedDict()

    def try_enter(self, slots: int = 1) -> bool:
        """Admit a request without waiting, if there is room and nobody waits."""
        if self.open and not self.waiting and self._has_room(slots):
            self.running += slots
            return True
        return False

    def _has_room(self, slots: int) -> bool:
        """Whether it fits, or is alone: what needs more than there is would wait permanently."""
        left = self.capacity - self.running
        return left >= slots or (self.running <= 0 < self.capacity)

    def wait(self, place: Place) -> None:
        """Join the queue; `QueueFull` when it has no room."""
        if self.waiting >= self.limit:
            raise QueueFull
        self._by_key.setdefault(place.key_id, deque()).append(place)
        self.waiting += 1
        place.position = self.waiting

    def leave(self, slots: int = 1) -> None:
        """An admitted request has ended."""
        self.running -= slots
        self.admit_waiting()

    def give_up(self, place: Place) -> None:
        """A request ended while it waited, or just after it was admitted."""
        if place.admitted:
            self.leave(place.slots)
            return
        places = self._by_key[place.key_id]
        places.remove(place)
        if not places:
            del self._by_key[place.key_id]
        self.waiting -= 1

    def admit_waiting(self) -> None:
        """Admit as many as fit, one of each key in turn."""
        while self.open and self.waiting:
            key_id, places = next(iter(self._by_key.items()))
            if not self._has_room(places[0].slots):
                return
            place = places.popleft()
            if places:
                self._by_key.move_to_end(key_id)
            else:
                del self._by_key[key_id]
            self.waiting -= 1
            self.running += place.slots
            place.admitted = True
            place.admit()
