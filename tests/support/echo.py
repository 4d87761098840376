"""Run as a child: answers with what it was asked, and what it can see."""

import json
import os
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if asked == "crash":
        sys.exit(3)
    if asked == "silent":
        sys.exit(0)
    try:
        socket.create_connection(("127.0.0.1", asked["port"]), timeout=2).close()
        network = "reached"
    except OSError:
        network = "none"
    try:
        Path(asked["write"]).write_text("x", encoding="utf-8")
        written = "yes"
    except OSError:
        written = "no"
    answer = {"asked": asked, "network": network, "written": written, "env": sorted(os.environ)}
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
