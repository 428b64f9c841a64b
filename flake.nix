{
  description = "Spotlight Attention: the pinned interpreter and uv, with the CUDA driver in reach";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-26.05";

  outputs =
    { nixpkgs, ... }:
    let
      inherit (nixpkgs) lib;
      systems = [
        "x86_64-linux"
        "aarch64-linux"
        "aarch64-darwin"
      ];
      eachSystem = f: lib.genAttrs systems (system: f nixpkgs.legacyPackages.${system});

      python = pkgs: pkgs.python312;

      # What the wheels expect of a Linux system. CUDA itself comes as wheels; only the driver cannot.
      wheelLibs = pkgs: [
        pkgs.stdenv.cc.cc.lib
        pkgs.zlib
      ];

      # Shared by the shell and by `nix run`, so that both see the same environment.
      env =
        pkgs:
        ''
          export UV_PYTHON=${python pkgs}/bin/python3
          export UV_PYTHON_DOWNLOADS=never
          root=$(git rev-parse --show-toplevel 2>/dev/null || pwd)
        ''
        + lib.optionalString pkgs.stdenv.hostPlatform.isLinux ''
          driver=${pkgs.addDriverRunpath.driverLink}/lib
          if [ ! -e "$driver/libcuda.so.1" ]; then
            # Not NixOS: link the driver's own libraries, for the host's folder would bring its glibc along.
            for dir in /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib64 /usr/lib/wsl/lib /usr/lib; do
              [ -e "$dir/libcuda.so.1" ] || continue
              driver=$root/.nix-driver
              mkdir -p "$driver"
              for lib in "$dir"/libcuda.so* "$dir"/libnvidia-{ml,ptxjitcompiler,nvvm,gpucomp}*.so*; do
                if [ -e "$lib" ]; then ln -sfn "$lib" "$driver/"; fi
              done
              break
            done
          fi
          export LD_LIBRARY_PATH=${lib.makeLibraryPath (wheelLibs pkgs)}:$driver''${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
          export TRITON_LIBCUDA_PATH=$driver
        '';

      shellHook =
        pkgs: env pkgs + "uv sync --project \"$root\" && . \"$root/.venv/bin/activate\"\n";

      # A command of the checkout, from any folder of it; relative paths are those of the folder it is called from.
      command =
        pkgs: name:
        pkgs.writeShellApplication {
          inherit name;
          runtimeInputs = [
            pkgs.git
            pkgs.uv
            (python pkgs)
          ];
          text = env pkgs + ''
            if [ ! -e "$root/packages/${name}/pyproject.toml" ]; then
              echo "expected a folder of Spotlight Attention's checkout, got $PWD; cd there and run again" >&2
              exit 2
            fi
            exec uv run --project "$root" ${name} "$@"
          '';
        };
    in
    {
      # No ruff or type checker here: uv installs the pinned ones.
      devShells = eachSystem (pkgs: {
        default = pkgs.mkShell {
          packages = [
            pkgs.uv
            pkgs.git
            (python pkgs)
          ];
          shellHook = shellHook pkgs;
        };
      });

      # `nix run .#hashtrain`, `nix run .#evals` and `nix run .#sparse-decode`.
      packages = eachSystem (
        pkgs:
        lib.genAttrs [
          "evals"
          "hashtrain"
          "sparse-decode"
        ] (command pkgs)
        // {
          default = command pkgs "hashtrain";
        }
      );

      formatter = eachSystem (pkgs: pkgs.nixfmt);

      checks = eachSystem (pkgs: {
        format = pkgs.runCommand "format" { nativeBuildInputs = [ pkgs.nixfmt ]; } ''
          nixfmt --check ${./flake.nix}
          touch $out
        '';
        hook =
          pkgs.runCommand "hook"
            {
              nativeBuildInputs = [ pkgs.shellcheck ];
              hook = shellHook pkgs;
              passAsFile = [ "hook" ];
            }
            ''
              shellcheck --shell=bash --exclude=SC1091 "$hookPath" # the virtual environment is not there yet
              touch $out
            '';
      });
    };
}
