"""Run the command line with `python -m evals`."""

from evals.cli import main

raise SystemExit(main())
