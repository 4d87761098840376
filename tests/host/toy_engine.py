"""An engine of another kind: its own paths, statuses, metrics and messages, and a worker process.

`python toy_engine.py SOCKET JSON`: the JSON says alias, template and faults. The process starts
itself again under another command line, and a worker of it listens. The secret is in TOY_SECRET.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar


class Handler(BaseHTTPRequestHandler):
    """Plain text where it can; a refusal is 403 with a `detail`."""

    plan: ClassVar[dict] = {}
    secret = ""

    def log_message(self, *_args) -> None:
        """Log nothing."""

    def answer(self, status: int, text: str) -> None:
        """Send a body."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def allowed(self) -> bool:
        """Refuse a wrong secret."""
        if self.plan.get("open") or self.headers.get("Authorization") == f"Bearer {self.secret}":
            return True
        self.answer(403, json.dumps({"detail": "who are you?"}))
        return False

    def do_GET(self) -> None:
        """Status, name and metrics."""
        if self.path == "/status":
            wait = self.plan.get("load_until")
            loading = wait is not None and not Path(wait).exists()
            return self.answer(425, "warming up") if loading else self.answer(200, "fine")
        if not self.allowed():
            return None
        if self.path == "/name":
            return self.answer(200, f"serving {self.plan['alias']}")
        if self.path == "/counters":
            return self.answer(200, "toy_running 1\ntoy_tokens_total 17\n")
        return self.answer(404, json.dumps({"detail": "no such path"}))

    def do_POST(self) -> None:
        """Completions; one token more than the prompt has words."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if not self.allowed():
            return None
        if self.path != "/v1/completions" or set(body) - {"prompt", "max_tokens", "temperature"}:
            return self.answer(422, json.dumps({"detail": f"cannot do {sorted(body)}"}))
        return self.answer(200, json.dumps({"choices": [{"text": " east."}]}))


class Server(ThreadingHTTPServer):
    """HTTP on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Bind to the path; there is no host name to look up."""
        socketserver.TCPServer.server_bind(self)


def main() -> None:
    """Take another command line, leave the serving to a worker, or be that worker."""
    *role, path, plan = sys.argv[1:]
    if not role:
        os.execv(sys.executable, [sys.executable, __file__, "retitled", path, plan])
    if role == ["retitled"]:
        sys.exit(subprocess.call([sys.executable, __file__, "worker", path, plan]))
    Handler.plan, Handler.secret = json.loads(plan), os.environ["TOY_SECRET"]
    Server(path, Handler).serve_forever()


if __name__ == "__main__":
    main()
