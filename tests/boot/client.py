"""One chat at the daemon's own API: ``client.py MODEL [stream]``. Writes the status, then each line as it comes."""

import json
import sys
from http.client import HTTPConnection

body = {
    "model": sys.argv[1],
    "stream": "stream" in sys.argv,
    "messages": [{"role": "user", "content": "hello"}],
}
connection = HTTPConnection("127.0.0.1", 11433, timeout=60)
connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
reply = connection.getresponse()
sys.stdout.write(f"{reply.status}\n")
for line in reply:
    sys.stdout.write(f"{line.decode().rstrip()}\n")
    sys.stdout.flush()
