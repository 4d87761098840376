"""A steady load of plain and streamed requests through a gate, each of them remembered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx2

TIMEOUT_S = 400.0
"""Longer than a hold."""
PAUSE_S = 0.1
"""After a refused request: a gate that is down refuses thousands a second."""
TOKENS = 12


@dataclass
class Asked:
    """One request."""

    began: float
    streamed: bool
    ended: float = 0.0
    generation: str = ""
    failure: str = ""


@dataclass
class Load:
    """Clients that ask without a pause, every second one for a stream."""

    url: str
    key: str
    model: str
    asked: list[Asked] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        """Ask while the block runs; every request has ended afterwards."""
        threads = [
            threading.Thread(target=self._client, args=(n % 2 == 0,), daemon=True)
            for n in range(clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(TIMEOUT_S)

    def failures(self, since: float) -> list[Asked]:
        """Requests that failed, of those that were under way then or began later."""
        return [a for a in list(self.asked) if a.failure and a.ended >= since]

    def _client(self, streamed: bool) -> None:
        with httpx2.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            while not self._stop.is_set():
                asked = Asked(time.monotonic(), streamed)
                self.asked.append(asked)
                asked.failure = self._ask(client, asked)
                asked.ended = time.monotonic()
                if asked.failure:
                    self._stop.wait(PAUSE_S)

    def _ask(self, client: httpx2.Client, asked: Asked) -> str:
        """What went wrong, in words; empty when the answer is whole."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Count from one to ten."}],
            "max_tokens": TOKENS,
            "stream": asked.streamed,
        }
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            with client.stream(
                "POST", f"{self.url}/v1/chat/completions", json=body, headers=headers
            ) as answer:
                asked.generation = answer.headers.get("x-mm-generation", "")
                text = answer.read()
        except httpx2.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        if answer.status_code != httpx2.codes.OK:
            return f"{answer.status_code} {text[:200]!r}"
        if asked.streamed and (b"[DONE]" not in text or b'"error"' in text):
            return f"the stream broke: {text[-200:]!r}"
        return ""
