"""Requests and tokens of the last seconds, by deployment and key: what `mm top` shows."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10
Count = list[int]
"""[requests, prompt tokens, completion tokens]"""


class Rates:
    """A window of whole seconds; `turn` is called once a second."""

    __slots__ = ("_now", "_past")

    def __init__(self) -> None:
        self._now: dict[tuple[str, str], Count] = {}
        self._past: deque[dict[tuple[str, str], Count]] = deque(maxlen=WINDOW_S)

    def add(self, deployment: str, key_id: str, prompt: int, completion: int) -> None:
        """Count one request that ended."""
        count = self._now.get((deployment, key_id))
        if count is None:
            count = self._now[deployment, key_id] = [0, 0, 0]
        count[0] += 1
        count[1] += prompt
        count[2] += completion

    def turn(self) -> None:
        """A second has passed."""
        self._past.append(self._now)
        self._now = {}

    def per_second(self, deployment: str) -> float:
        """Requests a second that ended, over the window."""
        ended = sum(
            count[0]
            for second in self._past
            for who, count in second.items()
            if who[0] == deployment
        )
        return ended / max(len(self._past), 1)

    def rows(self) -> list[dict[str, object]]:
        """Per deployment and key: rates per second over the window."""
        sums: dict[tuple[str, str], Count] = {}
        for second in self._past:
            for who, count in second.items():
                total = sums.setdefault(who, [0, 0, 0])
                for index in range(3):
                    total[index] += count[index]
        window = max(len(self._past), 1)
        return [
            {
                "deployment": deployment,
                "key": key_id,
                "requests_per_s": round(total[0] / window, 2),
                "prompt_tokens_per_s": round(total[1] / window, 1),
                "completion_tokens_per_s": round(total[2] / window, 1),
            }
            for (deployment, key_id), total in sorted(sums.items())
        ]
