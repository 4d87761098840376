"""Questions to a running engine: where to ask them and what an answer means.

Data and pure functions. The host sends the requests, the kind of engine reads the answers. A
question that a kind cannot answer is None; what depends on it is reported as not applicable.
Chats, completions and embeddings are not here: every engine serves them as the OpenAI API does,
and each answers to `Authorization: Bearer <secret>`.

A `read` function takes the body of an answer with status 200 and raises one of `UNREADABLE` for a
body of another form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mmadmin.core.build.recipe import Json
from mmadmin.core.snapshot import AnswerFields, ErrorPatterns

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
Body = Mapping[str, Json]
NO_PATTERNS = ErrorPatterns()
USUAL_FIELDS = AnswerFields()
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Question(Generic[T_co]):
    """A GET with the engine's secret."""

    path: str
    read: Callable[[str], T_co]


@dataclass(frozen=True, slots=True)
class Health:
    """A path that answers 200 when the engine is ready."""

    path: str
    loading: Collection[int] = (503,)
    """Statuses that mean that the model is being loaded."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A path that answers 200 to the right secret only."""

    path: str
    refusals: Collection[int] = (401,)
    """Statuses that refuse a wrong secret."""


@dataclass(frozen=True, slots=True)
class Context:
    """How many requests the engine takes at once, and the tokens that each may use."""

    slots: int
    """0 = it does not tell."""
    tokens_per_slot: int


@dataclass(frozen=True, slots=True)
class Rendering:
    """A POST that renders a chat request by the engine's own template."""

    path: str
    body: Callable[[Body], Body]
    read: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Speed:
    """What a request says about itself, in thousandths of a token a second."""

    prompt_milli: int
    generation_milli: int


@dataclass(frozen=True, slots=True)
class Questions:
    """All questions to one kind of engine."""

    health: Health
    served_names: Question[Sequence[str]]
    error_message: Callable[[str], str]
    """The message in the body of a refusal."""
    error_patterns: ErrorPatterns = NO_PATTERNS
    """How it words the errors that a client should see as errors of its request."""
    answer_fields: AnswerFields = USUAL_FIELDS
    """What it reads about the size of an answer."""
    guarded: Guarded | None = None
    model_file: Question[str] | None = None
    context: Question[Context] | None = None
    context_grain: int = 1
    """The engine rounds a context up to a multiple of this."""
    chat_template: Question[str] | None = None
    is_same_template: Callable[[str, str], bool] = operator.eq
    """Whether the served template (first) is the planned one."""
    special_tokens: Question[Mapping[str, str]] | None = None
    """The begin and end tokens that the engine gives its template."""
    template_takes_tools: Question[bool] | None = None
    rendering: Rendering | None = None
    progress: Question[str] | None = None
    """A mark that changes while any request makes progress; empty = no request is in work."""
    speed: Callable[[str], Speed] | None = None
    """What the answer of a completion says about its speed."""
    full_work: Body = field(default_factory=dict)
    """Fields of a request that make the engine do all its work: no cached prompt, no early end."""
    without_thinking: Body | None = None
    """Fields of a chat request that ask for an answer without reasoning."""
    unknown_options: Callable[[Sequence[str], str], Sequence[str]] | None = None
    """Options of a command that the program does not have, by its help text."""
    cause_of_end: Callable[[Sequence[str]], str] | None = None
    """The error in the last lines of its log that ended it; empty = none of them says."""
    own_environment: Sequence[str] = ()
    """Prefixes of environment variables that would change the engine behind its command."""
    keeps_command: bool = True
    """False when its processes overwrite their command line and environment."""
