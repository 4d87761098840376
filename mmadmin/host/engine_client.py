"""HTTP to one engine, with its secret: the questions of its kind, and requests as clients send."""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar

import httpx2

from mmadmin.core.engines.protocol import LaunchSpec
from mmadmin.core.engines.questions import UNREADABLE, Question

ANSWER_S = 10.0
"""How long the answer to a question may take."""
MESSAGE_CHARACTERS = 500
OK = 200
_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Engines speak plain HTTP: reading the web's certificate authorities takes 25 ms."""
T = TypeVar("T")


class Unanswered(Exception):
    """The engine refused a question, or gave an answer that cannot be read; the text says which."""


class EngineClient:
    """Requests to one engine, with its secret or with a wrong one. Close it after use."""

    def __init__(self, launch: LaunchSpec, secret: str) -> None:
        self._questions = launch.questions
        self._right = {"Authorization": f"Bearer {secret}"}
        self._http = httpx2.Client(
            base_url="http://localhost",
            timeout=ANSWER_S,
            trust_env=False,
            transport=httpx2.HTTPTransport(
                verify=_PLAIN,
                limits=httpx2.Limits(max_keepalive_connections=0),
                uds=launch.socket,
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, *, wrong_secret: bool = False) -> httpx2.Response:
        """GET with the right secret, or with one that nobody has."""
        secret = {"Authorization": f"Bearer {secrets.token_hex(32)}"}
        return self._http.get(path, headers=secret if wrong_secret else self._right)

    def ask(self, question: Question[T]) -> T:
        """The answer to a question. Raises `Unanswered`."""
        answer = self.get(question.path)
        if answer.status_code != OK:
            raise Unanswered(f"{question.path} was answered with {self.refusal(answer)}")
        try:
            return question.read(answer.text)
        except UNREADABLE as error:
            raise Unanswered(
                f"the answer of {question.path} has another form ({type(error).__name__}: {error})"
            ) from error

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> httpx2.Response:
        """POST JSON with the right secret."""
        return self._http.post(path, json=body, headers=self._right, timeout=timeout_s)

    def lines(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Iterator[str]:
        """POST JSON and read the answer's lines as they come; `timeout_s` is for the whole.

        Raises `httpx2.HTTPStatusError` for a refusal and `httpx2.ReadTimeout` at the deadline.
        """
        give_up = time.monotonic() + timeout_s
        with self._http.stream(
            "POST", path, json=body, headers=self._right, timeout=timeout_s
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                yield line
                if time.monotonic() > give_up:
                    raise httpx2.ReadTimeout("the stream takes too long", request=answer.request)

    def refusal(self, answer: httpx2.Response) -> str:
        """Status and message of an answer that is not 200."""
        return f"{answer.status_code}: {self.message(answer)}".removesuffix(": ")

    def message(self, answer: httpx2.Response) -> str:
        """The engine's own message in an answer that is not 200."""
        try:
            message = self._questions.error_message(answer.text)
        except UNREADABLE:
            message = answer.text
        return message.strip()[:MESSAGE_CHARACTERS]
