"""Run the command line with `python -m hashtrain`."""

from hashtrain.cli import main

raise SystemExit(main())
