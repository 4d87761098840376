"""A cloudflared that connects to nothing: prints what the real one prints, then waits.

Its behaviour is the last word of its own file name: `quick`, `named`, `fails`.
"""

import sys
import time

BOX = """\
2026-11-30T12:00:00Z INF Requesting new quick Tunnel on trycloudflare.com...
2026-11-30T12:00:01Z INF POST https://api.trycloudflare.com/tunnel
2026-11-30T12:00:01Z INF +-----------------------------------------------------------+
2026-11-30T12:00:01Z INF |  Your quick Tunnel has been created! Visit it at:         |
2026-11-30T12:00:01Z INF |  https://crossing-exhibit-mlb-stub.trycloudflare.com      |
2026-11-30T12:00:01Z INF +-----------------------------------------------------------+
"""
CONNECTED = "2026-11-30T12:00:02Z INF Registered tunnel connection connIndex=0 protocol=quic\n"
FAILED = "2026-11-30T12:00:02Z ERR failed to request quick Tunnel: dial tcp: no route to host\n"

if __name__ == "__main__":
    if "--url" in sys.argv and "127.0.0.1:9" in sys.argv[-1]:
        sys.stderr.write(FAILED)
        sys.exit(1)
    if "--url" in sys.argv:
        sys.stderr.write(BOX)
    sys.stderr.write(CONNECTED)
    sys.stderr.flush()
    time.sleep(600)
