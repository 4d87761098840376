"""The program of the toy engine: flags, paths, metrics and errors of its own. Standard library only."""

import argparse
import json
import os
import socket
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

GREETING = ""
READY_AT = 0.0
COUNTS = {"toy_running": 0, "toy_words_total": 0}
LOCK = threading.Lock()


def count(name, by):
    """Add to a counter."""
    with LOCK:
        COUNTS[name] += by


class Handler(BaseHTTPRequestHandler):
    """Answers in plain text, and completions as the OpenAI API does."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Log nothing."""

    def send(self, status, text, kind="text/plain"):
        """Send a whole body."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self):
        """Refuse a wrong secret."""
        if self.headers.get("Authorization") == "Bearer " + os.environ["TOY_SECRET"]:
            return True
        self.send(403, "sorry: who are you?")
        return False

    def do_GET(self):
        """Status, name and counters."""
        if self.path == "/status":
            return (
                self.send(425, "loading") if time.monotonic() < READY_AT else self.send(200, "ok")
            )
        if not self.allowed():
            return None
        if self.path == "/name":
            return self.send(200, "serving " + ARGS.name)
        if self.path == "/counters":
            counts = dict(COUNTS, toy_lanes=ARGS.lanes, toy_window=ARGS.window)
            return self.send(200, "".join(f"{name} {value}\n" for name, value in counts.items()))
        return self.send(404, "sorry: no such path")

    def do_POST(self):
        """Completions."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return None
        count("toy_running", 1)
        try:
            return self.answer(body)
        finally:
            count("toy_running", -1)

    def answer(self, body):
        """Say words, whole or as a stream."""
        chat = self.path == "/v1/chat/completions"
        if not chat and self.path != "/v1/completions":
            return self.send(404, "sorry: no such path")
        prompt = str(body["messages"][-1]["content"] if chat else body["prompt"]).split()
        if len(prompt) > ARGS.window:
            return self.send(500, f"sorry: too many words, {ARGS.window} are allowed")
        words = [GREETING, *MODEL["words"]][: body.get("max_tokens") or 4]
        count("toy_words_total", len(words))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(words)}
        usage["total_tokens"] = sum(usage.values())
        if not body.get("stream"):
            text = " ".join(words)
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice.update(index=0, finish_reason="stop")
            answer = {"model": ARGS.name, "choices": [choice], "usage": usage}
            return self.send(200, json.dumps(answer), "application/json")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for word in words:
            piece = {"delta": {"content": word + " "}} if chat else {"text": word + " "}
            self.event({"choices": [dict(piece, index=0)]})
            time.sleep(0.01)
        if (body.get("stream_options") or {}).get("include_usage"):
            self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        return None

    def event(self, data):
        """Send one event."""
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """HTTP on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self):
        """Bind to the path; there is no host and no port to look up."""
        socketserver.TCPServer.server_bind(self)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("model", "name", "socket"):
        parser.add_argument("--" + flag)
    for flag in ("lanes", "window", "load-ms"):
        parser.add_argument("--" + flag, type=int)
    ARGS = parser.parse_args()
    MODEL = json.loads(Path(ARGS.model).read_text(encoding="utf-8"))
    READY_AT = time.monotonic() + ARGS.load_ms / 1000
    Server(ARGS.socket, Handler).serve_forever()
