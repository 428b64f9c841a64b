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
from collections.abc import Mapping, Sequence
from typing import Any

from serving_checks.jobs import QUIET

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
README = ROOT / "packages" / "sparse-serve" / "README.md"
README_PORT = 8000  # vLLM's default
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
        command, env: how it is started; it listens on `port`.
    """

    def __init__(self, command: Sequence[str], port: int, log: pathlib.Path, env: Mapping[str, str]) -> None:
        self.port, self.log = port, log
        with log.open("a") as said:
            how: dict[str, Any] = {"stdout": said, "stderr": subprocess.STDOUT, "start_new_session": True}
            self.process: subprocess.Popen[Any] = subprocess.Popen(command, cwd=ROOT, env=env, **how)

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
        raise SystemExit(f"check_server: the server did not start: {text}")

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

    def stop(self, everyone: bool = False) -> int | None:
        """Interrupt it, or every process of its command; return its exit code, None if it had to be killed."""
        if self.process.poll() is None:
            (os.killpg if everyone else os.kill)(self.process.pid, signal.SIGINT)
        code = self.ended(60)
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return code


def of_model(model: str, spotlight: dict[str, Any], log: pathlib.Path) -> Server:
    """Start a server of a model's folder, with the plug-in's settings."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager"]
    command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "8"]
    command += ["--additional-config", json.dumps({"spotlight": spotlight})]
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return Server(command, port, log, os.environ | QUIET | variables)


def as_written(log: pathlib.Path) -> str:
    """Start the server of the README and ask it, both as the README says; return its answer.

    Raises: ValueError if a command is missing, the port is taken, or the answer is no completion with a text.
    """
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(), re.S)
    start = next((block for block in blocks if "vllm.entrypoints.openai.api_server" in block), None)
    request = next((block for block in blocks if block.startswith("curl ")), None)
    if start is None or request is None:
        raise ValueError("the README must show a line that starts the server, and a request with curl")
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", README_PORT))
        except OSError:
            raise ValueError(f"port {README_PORT}, which the README names, is taken; end what uses it") from None
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    kept |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = Server(["bash", "-c", start.strip()], README_PORT, log, kept)
    try:
        server.wait()
        asked = subprocess.run(["bash", "-c", request], cwd=ROOT, capture_output=True, text=True, timeout=300)
    finally:
        server.stop(everyone=True)
    try:
        text = json.loads(asked.stdout)["choices"][0]["text"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"the server answered no completion: {asked.stdout[:300]}") from None
    if not text.strip():
        raise ValueError("the server answered an empty text")
    return text
