"""What a spec asks the world for: each part's question, and the files of this host among them."""

from __future__ import annotations

from pathlib import Path

from mmadmin.core import catalog
from mmadmin.core.build.recipe import Json
from mmadmin.core.canonical import digest
from mmadmin.core.engines.protocol import TEMPLATE
from mmadmin.core.recipes.extract_template import OUTPUT
from mmadmin.core.spec.origin import Origin
from mmadmin.core.spec.pins import PinRequest
from mmadmin.core.spec.spec import Spec

ASK_DOMAIN = "mmadmin-lock-question-v1"


def requests_of(spec: Spec) -> list[PinRequest]:
    """What the engine wants pinned, and the template file."""
    template = spec.template
    question: dict[str, Json] = {"source": template.source, "file": template.file}
    origin = Origin(source="path", path=template.file) if template.source == "file" else None
    wanted = PinRequest(TEMPLATE, "template", question, origin, "template.file", saved_as=OUTPUT)
    return [*catalog.engine(spec.engine_kind).pins(spec), wanted]


def questions(spec: Spec) -> dict[str, str]:
    """A digest of what each part of the spec asks the world for."""
    return {r.part: digest(ASK_DOMAIN, r.question) for r in requests_of(spec)}


def local_files(spec: Spec) -> tuple[Path, ...]:
    """The files of this host that the spec names, a model's other shards included."""
    found: list[Path] = []
    for request in requests_of(spec):
        if request.origin is None or not request.reads_host:
            continue
        path = Path(request.origin.path)
        found.append(path)
        if request.model_format:
            owns = catalog.model_format(request.model_format).owns
            found += [one for one in path.parent.iterdir() if one != path and owns(one.name)]
    return tuple(found)


def reads_this_host(spec: Spec) -> bool:
    """True when something of it is a file of the host, whose bytes may change at any time."""
    return any(r.reads_host for r in requests_of(spec))
