"""What an open page asks for, without a browser: ``python -m benchmarks.watching.page_client``.

It stays until its process ends; a parent pauses it by SIGSTOP.
"""

import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from benchmarks.control import say
from rlmesh_ray.watch.live import PICTURES_PER_S

_STATISTICS_S, _SESSIONS_S = 3.0, 2.0


def ask(url: str, path: str, **values: object) -> tuple[bytes, float]:
    """Return the answer, and when to ask for the next picture."""
    query = urllib.parse.urlencode(values)
    try:
        with urllib.request.urlopen(f"{url}/api/{path}?{query}", timeout=20.0) as reply:
            return reply.read(), float(reply.headers.get("x-wait-s", 0.0))
    except urllib.error.HTTPError as error:
        with error:
            return b"", float(error.headers.get("x-wait-s", 1.0))


def main(url: str) -> None:
    """Watch the first lane of the first session of the first endpoint, for ever."""
    due_statistics_s = due_sessions_s = due_picture_s = 0.0
    key, session, num_pictures = "", "", 0
    while True:
        now_s = time.monotonic()
        if now_s >= due_statistics_s:
            due_statistics_s = now_s + _STATISTICS_S
            key = json.loads(ask(url, "endpoints")[0])["endpoints"][0]["key"]
        if now_s >= due_sessions_s:
            due_sessions_s = now_s + _SESSIONS_S
            answer, _ = ask(url, "sessions", endpoint=key)
            sessions = json.loads(answer or b'{"sessions": []}')["sessions"]
            session = sessions[0]["name"] if sessions else ""
        if session and now_s >= due_picture_s:
            png, wait_s = ask(url, "picture", endpoint=key, session=session, lane=0)
            due_picture_s = time.monotonic() + max(wait_s, 0.1)
            num_pictures += bool(png)
            say(pictures=num_pictures)
        time.sleep(0.5 / PICTURES_PER_S)


if __name__ == "__main__":
    main(sys.argv[1])
