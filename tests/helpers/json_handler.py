"""What servers of tests that speak JSON have in common."""

import json
from http.server import BaseHTTPRequestHandler


class JsonHandler(BaseHTTPRequestHandler):
    """Answers in JSON, and logs nothing."""

    def send_json(self, status: int, answer: object) -> None:
        self.send_text(status, json.dumps(answer), "application/json")

    def send_text(self, status: int, text: str, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass
