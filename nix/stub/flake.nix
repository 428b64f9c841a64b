{
  description = "As much of nixpkgs as ../../flake.nix uses, so that tests/test_flake.py evaluates it without a network";

  outputs =
    _:
    let
      lib = rec {
        genAttrs =
          names: f:
          builtins.listToAttrs (
            map (name: {
              inherit name;
              value = f name;
            }) names
          );
        optionalString = condition: text: if condition then text else "";
        makeLibraryPath = packages: builtins.concatStringsSep ":" (map (p: "${p}/lib") packages);
      };

      packagesFor =
        system:
        let
          package =
            name: attributes:
            derivation (
              {
                inherit name system;
                builder = "/bin/sh";
                args = [
                  "-c"
                  "echo stub > $out"
                ];
              }
              // attributes
            );
        in
        {
          stdenv = {
            cc.cc.lib = package "gcc-lib" { };
            hostPlatform.isLinux = builtins.match ".*-linux" system != null;
          };
          addDriverRunpath.driverLink = "/run/opengl-driver";
          mkShell = package "nix-shell";
          runCommand =
            name: attributes: text:
            package name (attributes // { inherit text; });
          writeShellApplication =
            {
              name,
              runtimeInputs,
              text,
            }:
            package name { inherit runtimeInputs text; };
        }
        // lib.genAttrs [
          "git"
          "nixfmt"
          "python312"
          "shellcheck"
          "uv"
          "zlib"
        ] (name: package name { });
    in
    {
      inherit lib;
      legacyPackages = lib.genAttrs [
        "x86_64-linux"
        "aarch64-linux"
        "aarch64-darwin"
      ] packagesFor;
    };
}
