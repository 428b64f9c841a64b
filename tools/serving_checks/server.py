"""The engine's OpenAI-compatible server, as a separate process on this machine, and requests to it."""

import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from serving_checks.jobs import QUIET

NAME = "demo"
PATIENCE = 900.0  # seconds for a server to start


def children(pid: int) -> dict[int, str]:
    """Return a process's descendants: id and command line."""
    found: dict[int, str] = {}
    parents: dict[int, int] = {}
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue

    def descends(one: int) -> bool:
        while one in parents:
            one = parents[one]
            if one == pid:
                return True
        return False

    return {one: line for one, line in found.items() if descends(one)}


class Server:
    """A running server; its output goes to a file.

    Args:
        model, spotlight: the model's folder, and the plug-in's settings.
    """

    def __init__(self, model: str, spotlight: dict[str, Any], log: pathlib.Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager"]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        command += ["--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "8"]
        command += ["--additional-config", json.dumps({"spotlight": spotlight})]
        kept = os.environ | QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
        self.log: pathlib.Path = log
        with log.open("a") as said:
            how: dict[str, Any] = {"stdout": said, "stderr": subprocess.STDOUT, "env": kept, "start_new_session": True}
            self.process: subprocess.Popen[Any] = subprocess.Popen(command, **how)

    def wait(self) -> None:
        """Wait until it responds. Raises: SystemExit with the end of its output if it exits, or takes too long."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.5)
        text = self.log.read_text()[-3000:]
        self.stop()
        raise SystemExit(f"check_server: no server: {text}")

    def get(self, path: str) -> tuple[int, str]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            link.request("GET", path)
            answer = link.getresponse()
            return answer.status, answer.read().decode()
        finally:
            link.close()

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels. Raises: KeyError if there is none."""
        lines = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics")[1], re.M)
        if not lines:
            raise KeyError(name)
        return sum(map(float, lines))

    def complete(self, prompt: list[int], new: int, leave_after: int | None = None) -> list[int] | None:
        """Request a completion; abandon it after `leave_after` tokens, if given.

        Returns: its tokens, None if abandoned. Raises: OSError or HTTPException if the connection is lost.
        """
        request = {"model": NAME, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        request |= {"stream": True, "return_token_ids": True}
        link, tokens = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120), []
        try:
            link.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
            answer = link.getresponse()
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.read()[:300]!r}")
            for line in answer:
                text = line.decode().removeprefix("data: ").strip()
                if text == "[DONE]":
                    return tokens
                if text:
                    found = json.loads(text)
                    if "error" in found:
                        raise OSError(str(found["error"])[:300])
                    tokens += found["choices"][0]["token_ids"] or []
                if leave_after is not None and len(tokens) >= leave_after:
                    return None
            raise OSError("the answer is incomplete")
        finally:
            link.close()

    def kill_worker(self, draw: random.Random) -> str:
        """Kill one of its worker processes, as the kernel does when out of memory; return its command line."""
        found = {pid: line for pid, line in children(self.process.pid).items() if "resource_tracker" not in line}
        pid = draw.choice(sorted(found))
        os.kill(pid, signal.SIGKILL)
        return found[pid]

    def ended(self, patience: float) -> int | None:
        """Wait until it exits by itself; return its exit code, None if it has not."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, patience: float = 60) -> int | None:
        """Interrupt it like Ctrl-C; return its exit code, None if it had to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.ended(patience)
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return code
