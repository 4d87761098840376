"""A tiny identity provider (OpenID Connect): real keys, real tokens, one person at a time."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT, SECRET = "mmadmin", "the panel's secret"


class Provider:
    """What it knows, and what it lies about: the tests set both."""

    def __init__(self) -> None:
        self.issuer = ""
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.person: dict[str, Any] = {"sub": "u1", "preferred_username": "nora"}
        """The claims of whoever is logged in there."""
        self.lies: dict[str, Any] = {}
        """Put over the claims of the token."""
        self.lies_about_person: dict[str, Any] = {}
        """Put over the details."""
        self.signs_with: Any = self.key
        self.asked: dict[str, dict[str, str]] = {}
        """What came with each code that was given out."""

    def documents(self) -> dict[str, Any]:
        """What anybody may read."""
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        return {
            "/.well-known/openid-configuration": {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "userinfo_endpoint": f"{self.issuer}/userinfo",
                "jwks_uri": f"{self.issuer}/keys",
                "id_token_signing_alg_values_supported": ["RS256"],
            },
            "/keys": {"keys": [{**public, "kid": "k1", "alg": "RS256", "use": "sig"}]},
            "/userinfo": self.person | self.lies_about_person,
        }

    def token(self, form: dict[str, str]) -> dict[str, Any] | None:
        """The tokens for a code; None when something does not fit."""
        asked = self.asked.pop(form["code"], None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if (
            asked is None
            or (form["client_id"], form["client_secret"]) != (CLIENT, SECRET)
            or form["redirect_uri"] != asked["redirect_uri"]
            or challenge != asked["code_challenge"]
        ):
            return None
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "exp": int(time.time()) + 600,
            "iat": int(time.time()),
            "nonce": asked["nonce"],
            **self.person,
            **self.lies,
        }
        signed = jwt.encode(claims, self.signs_with, algorithm="RS256", headers={"kid": "k1"})
        return {"access_token": "a", "token_type": "Bearer", "id_token": signed}


class _Handler(BaseHTTPRequestHandler):
    provider: Provider

    def do_GET(self) -> None:
        """Documents, details, and the page where the person would log in."""
        url = urlsplit(self.path)
        if url.path == "/authorize":
            asked = {name: values[0] for name, values in parse_qs(url.query).items()}
            code = secrets.token_urlsafe(8)
            self.provider.asked[code] = asked
            back = urlencode({"code": code, "state": asked["state"]})
            self.send_response(302)
            self.send_header("Location", f"{asked['redirect_uri']}?{back}")
            self.end_headers()
            return
        self._json(self.provider.documents().get(url.path))

    def do_POST(self) -> None:
        """A code for tokens."""
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = {name: values[0] for name, values in parse_qs(text).items()}
        self._json(self.provider.token(form))

    def _json(self, data: dict[str, Any] | None) -> None:
        body = json.dumps(data if data is not None else {"error": "invalid_grant"}).encode()
        self.send_response(200 if data is not None else 400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def provider() -> Iterator[Provider]:
    """Run it while the block runs."""
    it = Provider()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"provider": it}))
    it.issuer = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield it
    finally:
        server.shutdown()
        server.server_close()
