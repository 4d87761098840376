"""A stub in the place of a built llama-server: the options of the real one, faults by context.

`python stub_server.py FAULTS …`: the words after the file are llama-server's own. The file holds
plans of `tests/host/stub_engine.py` by the context that a slot is given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mmadmin.core.engines.llama_server.flags import BY_NAME
from tests.host import stub_engine


def after(word: str) -> str:
    """The value of an option."""
    return sys.argv[sys.argv.index(word) + 1]


def main() -> None:
    """List the options, say what it is, or serve as planned."""
    if "--help" in sys.argv:
        names = [*BY_NAME, *(flag.off for flag in BY_NAME.values() if flag.off)]
        stub_engine.say("\n".join(f"--{name}" for name in names))
        return
    if "--host" not in sys.argv:
        stub_engine.say("version: stub")
        return
    slots = int(after("--parallel"))
    context = int(after("--ctx-size")) // slots
    plan = {
        "alias": after("--alias"),
        "model": after("--model"),
        "context": context,
        "slots": slots,
        **json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).get(str(context), {}),
    }
    sys.argv = [sys.argv[0], after("--host"), json.dumps(plan)]
    stub_engine.main()


if __name__ == "__main__":
    main()
