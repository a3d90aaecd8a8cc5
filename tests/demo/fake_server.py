"""Stands in for `mstar serve` in test_run.py: the four routes that demo/run.py uses, and none of the model.

`fake_server.py MODE --model DIR --port PORT`; MODE is "good", "dies" (exits with 3 before it is ready), "deaf" (ignores SIGINT) or
"refuses" (404).
"""

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = sys.argv[1]
SLOTS = [
    {"slot": 1, "adapter": "pirate", "holders": 0},
    {"slot": 2, "adapter": "bullets", "holders": 0},
    {"slot": 3, "adapter": None, "holders": 0},
]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, {"ranks": [{"tp_rank": 0, "slots": SLOTS}]} if self.path == "/mstar/status" else {})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "refuses":
            self.reply(404, {"error": {"message": f"The model `{request['model']}` does not exist."}})
            return
        message = {"role": "assistant", "content": f"[hello] from {request['model']}"}
        self.reply(200, {"choices": [{"message": message}], "usage": {"completion_tokens": 7}})

    def reply(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


sys.stderr.write("[fake] loading weights\n")
if MODE == "dies":
    sys.stderr.write("out of luck\n")
    sys.exit(3)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits one that ignores it
if MODE == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
except KeyboardInterrupt:
    sys.stderr.write("fake server stopped\n")
