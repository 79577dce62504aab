"""One user: asks, reads the stream to its end, asks again."""

import os
import random

from locust import HttpUser, task

QUESTIONS = ("What is the capital of France?", "What is 12 + 30?", "What is 7 times 8?", "Where is Haiti?")


class Person(HttpUser):
    """Waits for nobody."""

    @task
    def chat(self):
        """Ask one question; a stream without its end is a failure."""
        body = {
            "model": os.environ["CONFORMANCE_MODEL"],
            "messages": [{"role": "user", "content": random.choice(QUESTIONS)}],
            "max_tokens": 60,
            "stream": True,
        }
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True
        ) as response:
            lines = [line for line in response.iter_lines() if line]
            if response.status_code != 200 or lines[-1] != b"data: [DONE]":
                response.failure(f"status {response.status_code}, last line {lines[-1:]}")
