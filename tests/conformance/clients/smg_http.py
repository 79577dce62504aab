"""The smg gateway in front of us over HTTP, asked by OpenAI's client."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import openai
from checks import MODEL, QUESTION, URL, WORD, check


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PORT = free_port()
COMMAND = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(PORT)]
COMMAND += ["--worker-urls", URL, "--prometheus-port", str(free_port())]
GATEWAY = f"http://127.0.0.1:{PORT}"


def main() -> None:
    process = subprocess.Popen(COMMAND, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True)
    try:
        ask(process)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def ask(process) -> None:
    client = openai.OpenAI(base_url=f"{GATEWAY}/v1", api_key="none", max_retries=0, timeout=60)
    names: list[str] = []

    @check("it takes us for a worker")
    def _():
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert process.poll() is None, "it ended"
            try:
                with urllib.request.urlopen(f"{GATEWAY}/v1/models", timeout=5):
                    names.extend(model.id for model in client.models.list())
                if names:
                    return ", ".join(names)
            except OSError:
                pass
            time.sleep(0.5)
        raise TimeoutError("it lists no model")

    name = MODEL if MODEL in names or not names else names[0]
    chat = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}

    @check("chat")
    def _():
        assert WORD in client.chat.completions.create(**chat).choices[0].message.content

    @check("streamed chat")
    def _():
        stream = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert WORD in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage

    @check("text completion")
    def _():
        assert client.completions.create(model=name, prompt="One two", max_tokens=4).choices[0].text

    @check("a bad request stays one")
    def _():
        try:
            client.chat.completions.create(**chat | {"temperature": 9})
        except openai.BadRequestError:
            return
        raise AssertionError("no BadRequestError")


main()
