"""The flake evaluates, against nix/stub in place of nixpkgs, and the shell text in it runs."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SYSTEMS = ("aarch64-darwin", "aarch64-linux", "x86_64-linux")


@pytest.fixture(scope="module")
def nix(tmp_path_factory):
    """Run `nix ... FLAKE#ATTRIBUTE` offline, in a store of its own."""
    if shutil.which("nix") is None:
        message = "nix is not on PATH; on Debian it is the package nix-bin"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    folder = tmp_path_factory.mktemp("flake")
    # A copy: nix would copy the whole checkout, its virtual environment too, into the store.
    shutil.copytree(ROOT / "nix", folder / "flake" / "nix")
    for name in ("flake.nix", "flake.lock"):
        shutil.copy(ROOT / name, folder / "flake")

    def run(*arguments, attribute=""):
        command = ["nix", "--extra-experimental-features", "nix-command flakes", "--offline"]
        command += ["--store", f"{folder}/store", *arguments, f"path:{folder}/flake{attribute}"]
        command += ["--no-write-lock-file", "--override-input", "nixpkgs", f"path:{folder}/flake/nix/stub"]
        done = subprocess.run(command, env=os.environ | {"HOME": str(folder)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def scripts(nix):
    """The shell text of the flake: {(what, system): text}."""
    found = {}
    for what, of in (("devShells", "default.shellHook"), ("packages", "hashtrain.text")):
        output = nix("eval", "--json", "--apply", f"builtins.mapAttrs (_: s: s.{of})", attribute=f"#{what}")
        found |= {(what, system): text for system, text in json.loads(output).items()}
    return found


def test_every_output_evaluates(nix):
    nix("flake", "check", "--no-build")
    for output in ("checks", "formatter"):
        listed = nix("eval", "--json", "--apply", "builtins.attrNames", attribute=f"#{output}")
        assert json.loads(listed) == list(SYSTEMS)


def test_shell_text_parses(scripts):
    assert {system for _, system in scripts} == set(SYSTEMS)
    for where, text in scripts.items():
        # As nixpkgs wraps it; SC1091: the virtual environment it sources is made by the line itself.
        script = f"#!/usr/bin/env bash\nset -euo pipefail\n{text}"
        parsers = [["bash", "-n"]]
        if shutil.which("shellcheck"):
            parsers.append(["shellcheck", "--exclude=SC1091", "-"])
        for parser in parsers:
            done = subprocess.run(parser, input=script, capture_output=True, text=True)
            assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"


def test_hook_syncs_and_puts_the_driver_in_reach(scripts, tmp_path):
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\nmkdir -p .venv/bin\necho \"activated='$*'\" > .venv/bin/activate\n")
    uv.chmod(0o755)
    script = scripts["devShells", "x86_64-linux"] + 'echo "$activated|$LD_LIBRARY_PATH|$TRITON_LIBCUDA_PATH|$UV_PYTHON"'
    environment = {"PATH": f"{uv.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    activated, libraries, driver, python = done.stdout.strip().split("|")
    assert activated == "sync"
    assert driver in ("/run/opengl-driver/lib", f"{tmp_path}/.nix-driver")
    assert libraries.endswith(f":{driver}")
    assert python.endswith("-python312/bin/python3")


def test_lock_pins_the_input_of_the_flake():
    owner, repo, ref = re.search(r'nixpkgs.url = "github:(.+)/(.+)/(.+)"', (ROOT / "flake.nix").read_text()).groups()
    locked = json.loads((ROOT / "flake.lock").read_text())["nodes"]["nixpkgs"]
    assert locked["original"] == {"type": "github", "owner": owner, "repo": repo, "ref": ref}
    assert re.fullmatch(r"[0-9a-f]{40}", locked["locked"]["rev"])
    assert locked["locked"]["narHash"].startswith("sha256-")
