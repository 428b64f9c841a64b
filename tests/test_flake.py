"""The flake evaluates, against nix/stub in place of nixpkgs, and the shell text in it runs."""

import base64
import json
import os
import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOOKS = "builtins.mapAttrs (_: s: s.default.shellHook)"
COMMANDS = "builtins.mapAttrs (_: builtins.mapAttrs (_: command: command.text))"
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
    """The shell text of the flake: {("hook" or a command, system): text}."""
    hooks = json.loads(nix("eval", "--json", "--apply", HOOKS, attribute="#devShells"))
    commands = json.loads(nix("eval", "--json", "--apply", COMMANDS, attribute="#packages"))
    found = {("hook", system): text for system, text in hooks.items()}
    return found | {(name, system): text for system, texts in commands.items() for name, text in texts.items()}


def test_every_output_evaluates(nix):
    nix("flake", "check", "--no-build")
    for output in ("checks", "devShells", "formatter", "packages"):
        listed = nix("eval", "--json", "--apply", "builtins.attrNames", attribute=f"#{output}")
        assert json.loads(listed) == list(SYSTEMS)


def test_shell_text_parses(scripts):
    names = {"hook", "default", "evals", "hashtrain", "sparse-decode"}
    assert scripts.keys() == {(name, system) for name in names for system in SYSTEMS}
    for where, text in scripts.items():
        # As nixpkgs wraps it; SC1091: the virtual environment it sources is made by the line itself.
        script = f"#!/usr/bin/env bash\nset -euo pipefail\n{text}"
        parsers = [["bash", "-n"]]
        if shutil.which("shellcheck") or os.environ.get("CI") == "true":
            parsers.append(["shellcheck", "--exclude=SC1091", "-"])
        for parser in parsers:
            done = subprocess.run(parser, input=script, capture_output=True, text=True)
            assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"


UV = """#!/bin/sh
[ "$2" != --project ] || mkdir -p "$3/.venv/bin"
[ "$1" != sync ] || echo "activated='$*'" > "$3/.venv/bin/activate"
[ "$1" != run ] || printf '%s|' "$@"
"""


@pytest.fixture
def shell(tmp_path):
    """Run shell text with a uv that does nothing; in a checkout, or in what else is asked for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(UV)
    (tmp_path / "bin" / "uv").chmod(0o755)
    checkout = tmp_path / "a checkout"
    for name in ("evals", "hashtrain", "sparse-decode"):
        (checkout / "packages" / name).mkdir(parents=True)
        (checkout / "packages" / name / "pyproject.toml").touch()
    subprocess.run(["git", "init", "-q", checkout], check=True)

    def run(script, *arguments, folder="."):
        environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "GIT_CEILING_DIRECTORIES": str(tmp_path)}
        command = ["bash", "-euo", "pipefail", "-c", script, "bash", *arguments]
        return subprocess.run(command, cwd=checkout / folder, env=environment, capture_output=True, text=True)

    run.checkout = checkout
    return run


@pytest.mark.parametrize("folder", [".", "packages/hashtrain"])
def test_hook_syncs_and_puts_the_driver_in_reach(scripts, shell, folder):
    said = 'echo "$activated|$LD_LIBRARY_PATH|$TRITON_LIBCUDA_PATH|$UV_PYTHON"'
    done = shell(scripts["hook", "x86_64-linux"] + said, folder=folder)
    assert done.returncode == 0, done.stderr
    activated, libraries, driver, python = done.stdout.strip().split("|")
    assert activated == f"sync --project {shell.checkout}"
    assert driver in ("/run/opengl-driver/lib", f"{shell.checkout}/.nix-driver")
    assert libraries.endswith(f":{driver}")
    assert python.endswith("-python312/bin/python3")


@pytest.mark.parametrize("folder", [".", "packages/hashtrain"])
@pytest.mark.parametrize("name", ["evals", "hashtrain", "sparse-decode"])
def test_commands_run_from_any_folder_of_the_checkout(scripts, shell, name, folder):
    done = shell(scripts[name, "x86_64-linux"], "--out", "two words", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"run|--project|{shell.checkout}|{name}|--out|two words|"
    assert name in project_scripts(name)


def project_scripts(name):
    return tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]["scripts"]


def test_the_default_command_is_hashtrain(scripts):
    for system in SYSTEMS:
        assert scripts["default", system] == scripts["hashtrain", system]


def test_commands_outside_of_a_checkout_are_refused_in_a_sentence(scripts, shell):
    done = shell(scripts["evals", "x86_64-linux"], folder="..")
    assert done.returncode == 2
    assert done.stderr.startswith("expected a folder of Spotlight Attention's checkout, got ")
    assert done.stderr.count("\n") == 1


def test_lock_pins_the_input_of_the_flake():
    owner, repo, ref = re.search(r'nixpkgs.url = "github:(.+)/(.+)/(.+)"', (ROOT / "flake.nix").read_text()).groups()
    locked = json.loads((ROOT / "flake.lock").read_text())["nodes"]["nixpkgs"]
    assert locked["original"] == {"type": "github", "owner": owner, "repo": repo, "ref": ref}
    assert re.fullmatch(r"[0-9a-f]{40}", locked["locked"]["rev"])
    digest = locked["locked"]["narHash"].removeprefix("sha256-")
    assert len(base64.b64decode(digest, validate=True)) == 32
    assert {key: locked["locked"][key] for key in ("type", "owner", "repo")} == {
        "type": "github",
        "owner": owner,
        "repo": repo,
    }
