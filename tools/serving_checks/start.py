"""The start that a README shows: its server line and its request, run as they are written."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
README = ROOT / "packages" / "sparse-serve" / "README.md"
PORT, PATIENCE = 8000, 900.0  # vLLM's default port; seconds for the server to start


def commands(text: str) -> tuple[str, str]:
    """Return the server line and the request of a README: the first code block that starts each.

    Raises: ValueError if one is missing.
    """
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    server = [block for block in blocks if "vllm.entrypoints.openai.api_server" in block]
    request = [block for block in blocks if block.startswith("curl ")]
    if not (server and request):
        raise ValueError("the README must show a line that starts the server, and a request with curl")
    return server[0].strip(), request[0].strip()


def answered(output: str) -> str:
    """Return the text that the server answered. Raises: ValueError if it is something else."""
    try:
        text = json.loads(output)["choices"][0]["text"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"the server answered no completion: {output[:300]}") from None
    if not text.strip():
        raise ValueError("the server answered an empty text")
    return text


def started(log: pathlib.Path) -> tuple[str, list[str]]:
    """Start the server and ask it, both as the README says; return its answer and what was wrong."""
    server, request = commands(README.read_text())
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", PORT))
        except OSError:
            return "", [f"port {PORT}, which the README's request names, is taken; end what uses it"]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    kept |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as said:
        process = subprocess.Popen(
            ["bash", "-c", server], cwd=ROOT, stdout=said, stderr=said, env=kept, start_new_session=True
        )
    try:
        if not ready(process):
            return "", [f"the README's server did not start: {log.read_text()[-2000:]}"]
        done = subprocess.run(["bash", "-c", request], cwd=ROOT, capture_output=True, text=True, timeout=300)
        return answered(done.stdout), []
    except ValueError as wrong:
        return "", [str(wrong)]
    finally:
        end(process)


def ready(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the server answers; return whether it does."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=10) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the server and all its processes, like Ctrl-C; kill them if they stay."""
    for sign, patience in ((signal.SIGINT, 60), (signal.SIGKILL, 60)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            print(f"start: the server did not end within {patience} s", file=sys.stderr)
