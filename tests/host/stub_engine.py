"""A tiny engine that speaks just enough of llama-server, and fails in the ways that tests need.

`python stub_engine.py SOCKET JSON`: the JSON says alias, model path, context, slots and the fault.
The secret comes from LLAMA_API_KEY, as for the real one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar


class Handler(BaseHTTPRequestHandler):
    """Answers like a server that loads for a while and then works, or does not."""

    plan: ClassVar[dict] = {}
    secret = ""

    def log_message(self, *_args) -> None:
        """Say nothing a request."""

    def answer(self, status: int, body: object) -> None:
        """Send JSON."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def loading(self) -> bool:
        """True until the plan's file is there."""
        until = self.plan.get("load_until")
        return until is not None and not Path(until).exists()

    def allowed(self) -> bool:
        """True with the right secret, or when the fault is to take any."""
        if self.plan.get("open"):
            return True
        return self.headers.get("Authorization") == f"Bearer {self.secret}"

    def do_GET(self) -> None:
        """Health, models and properties."""
        plan = self.plan
        if self.path == "/health":
            busy = {"error": {"code": 503, "message": "Loading model"}}
            return self.answer(503, busy) if self.loading() else self.answer(200, {"status": "ok"})
        if not self.allowed():
            error = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
            return self.answer(401, {"error": error})
        if self.path == "/v1/models":
            return self.answer(200, {"data": [{"id": plan.get("serve_alias", plan["alias"])}]})
        if self.path == "/props":
            settings = {"n_ctx": plan["context"]}
            props = {
                "default_generation_settings": settings,
                "total_slots": plan["slots"],
                "model_path": plan["model"],
                "chat_template": plan.get("template", ""),
                "chat_template_caps": {"supports_tools": not plan.get("no_tools")},
            }
            return self.answer(200, props)
        if self.path == "/slots" and "work" in plan:
            return self.answer(200, json.loads(Path(plan["work"]).read_text()))
        return self.answer(404, {})

    def do_POST(self) -> None:
        """Completions, chats and template renderings, or silence."""
        plan = self.plan
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if not self.allowed():
            return self.answer(401, {})
        if plan.get("hang"):
            time.sleep(3600)
        if self.path == "/apply-template":
            return self.template(body)
        if self.path == "/v1/chat/completions" and not body.get("stream"):
            choice = {"message": self.message(body), "finish_reason": plan.get("ends", "stop")}
            return self.answer(200, {"choices": [choice]})
        if body.get("stream"):
            return self.stream()
        empty = plan.get("empty") or (plan.get("half") and body.get("max_tokens") == 1)
        text = "" if empty else " east."
        timings = {"predicted_per_second": plan.get("speed", 100.5), "prompt_per_second": 1000}
        data = {"choices": [{"text": text}], "timings": timings}
        return self.answer(plan.get("status", 200), data)

    def template(self, body: dict) -> None:
        """The last user's text, or a refusal as the real server words it."""
        effort = body.get("reasoning_effort")
        if effort not in (None, "none", "high") and self.plan.get("strict"):
            message = 'Jinja Exception: reasoning_effort must be either "none" or "high"'
            return self.answer(500, {"error": {"code": 500, "message": message}})
        if body.get("tools") and self.plan.get("broken_tools"):
            return self.answer(200, {"prompt": "{{- tools }} " + json.dumps(body["messages"])})
        if len(body["messages"]) > 1 and self.plan.get("broken_turns"):
            return self.answer(200, {"prompt": "{%- for %} " + json.dumps(body["messages"])})
        tools = [] if self.plan.get("ignores_tools") else body.get("tools", [])
        return self.answer(200, {"prompt": json.dumps([*tools, *body["messages"]])})

    def message(self, body: dict) -> dict:
        """A tool call where tools are given, else an answer with its reasoning."""
        if body.get("tools"):
            function = {"name": "multiply", "arguments": self.plan.get("arguments", "{}")}
            calls = [] if self.plan.get("talks") else [{"function": function}]
            return {"content": "Well." if not calls else None, "tool_calls": calls}
        if self.plan.get("leaks"):
            return {"content": "<think>hm</think>391"}
        if self.plan.get("thinks_only"):
            return {"content": "", "reasoning_content": "The answer is 391."}
        if body.get("chat_template_kwargs", {}).get("enable_thinking") is False:
            return {"content": self.plan.get("without_thinking", "391")}
        return {"content": "391", "reasoning_content": "17 * 23"}

    def stream(self) -> None:
        """Four pieces, usage and the end, each part as the plan has it."""
        pieces = [{"choices": [{"text": "a"}]}] * self.plan.get("pieces", 4)
        usage = (
            []
            if self.plan.get("no_usage")
            else [{"choices": [], "usage": {"completion_tokens": 4}}]
        )
        lines = [f"data: {json.dumps(chunk)}" for chunk in [*pieces, *usage]]
        if not self.plan.get("no_done"):
            lines.append("data: [DONE]")
        data = ("\n\n".join([": ping", *lines]) + "\n\n").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """HTTP on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Bind to the path; there is no host name to look up."""
        socketserver.TCPServer.server_bind(self)


def wait_for(path: str) -> None:
    """Return once the file is there."""
    while not Path(path).exists():
        time.sleep(0.02)


def say(line: str) -> None:
    """A line for the log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until told to stop; some plans do not listen to that."""
    path, plan = sys.argv[1], json.loads(sys.argv[2])
    if plan.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if plan.get("child"):
        # A child in the same group that does not listen to SIGTERM either.
        code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        child = subprocess.Popen([sys.executable, "-c", code])
        say(f"child {child.pid}")
    if plan.get("kill"):
        wait_for(plan["end_when"])
        os.kill(os.getpid(), signal.Signals[plan["kill"]])
    if plan.get("exit"):
        wait_for(plan["end_when"])
        say("error: cannot find tokenizer merges in model file")
        sys.exit(plan["exit"])
    Handler.plan = plan
    Handler.secret = os.environ["LLAMA_API_KEY"]
    server = Server(path, Handler)
    say("listening")
    server.serve_forever()


if __name__ == "__main__":
    main()
