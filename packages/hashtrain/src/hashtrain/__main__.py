"""`python -m hashtrain` is `hashtrain`."""

from hashtrain.cli import main

raise SystemExit(main())
