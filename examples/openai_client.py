"""A Trellis server with the ``openai`` package as its client (pip install openai).

python examples/openai_client.py                                  # starts a server, and stops it again
python examples/openai_client.py --url http://127.0.0.1:30000     # uses one that runs
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

MODEL = "smollm2-135m"


@contextlib.contextmanager
def started_server() -> Iterator[str]:
    """Start a server on a free port and wait until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "trellis.launch_server", "--model-path", MODEL, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, "--log-level", "warning"]) as server:
        try:
            while not healthy(url):
                if server.poll() is not None:
                    raise SystemExit("the server did not start")
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main(url: str) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = "What is the capital of France?"
    print(f"model: {model}\nuser: {question}\nassistant: ", end="")

    pieces = []
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    for chunk in stream:
        piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
        print(piece, end="", flush=True)
        pieces.append(piece)

    again = client.completions.create(model=model, prompt="1, 2, 3, 4,", temperature=0, max_tokens=8)
    print(f"\ncompletion: 1, 2, 3, 4,{again.choices[0].text}")
    return "".join(pieces)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="a running server")
    arguments = parser.parse_args()
    if arguments.url:
        main(arguments.url)
    else:
        print("starting a server ...", flush=True)
        with started_server() as url:
            main(url)
