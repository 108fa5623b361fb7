"""An OpenAI-compatible engine of the standard library alone, for a container that has nothing else."""

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVENTS = {"short": 12, "endless": 1_000_000}
EVERY_S = 0.2


class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        listed = [{"id": name, "object": "model", "max_model_len": 8_192} for name in EVENTS]
        self._whole(200 if self.path == "/v1/models" else 404, {"object": "list", "data": listed})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not asked.get("stream"):
            self._whole(
                200, {"object": "chat.completion", "choices": [{"index": 0, "message": {"content": "hello"}}]}
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number in range(EVENTS[asked["model"]]):
            event = {
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": {"content": f"{number} "}}],
            }
            self.wfile.write(b"data: %s\n\n" % json.dumps(event).encode())
            time.sleep(EVERY_S)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _whole(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", 8000), Engine).serve_forever()
