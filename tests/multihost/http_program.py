"""Waits for a server on this host, streams answers, prints ``streaming`` once all have begun, then how each ended."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

EVENTS = 3


def main() -> None:
    url, bodies = sys.argv[1], json.loads(sys.argv[2])
    wait_until_ready(url)
    begun = threading.Barrier(len(bodies) + 1)
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(stream, url, body, begun) for body in bodies]
        begun.wait(120)
        print("streaming", flush=True)
        print(json.dumps([answer.result() for answer in answers]), flush=True)


def wait_until_ready(url: str) -> None:
    until = time.monotonic() + 180
    while True:
        try:
            topology = httpx.get(f"{url}/topology", timeout=5).json()
            if all(replica["state"] == "running" for replica in topology["replicas"]):
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > until:
            raise TimeoutError(f"{url} is not ready")
        time.sleep(0.2)


def stream(url: str, body: dict[str, Any], begun: threading.Barrier) -> dict[str, Any]:
    """The text, the error that ended it, and the seconds from the last event before it."""
    text, count, last = "", 0, time.monotonic()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=120) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return {"text": text, "error": event["error"]["message"], "seconds": time.monotonic() - last}
            for choice in event["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            last = time.monotonic()
            count += 1
            if count == EVENTS:
                begun.wait(120)
    return {"text": text, "error": None}


if __name__ == "__main__":
    main()
