"""`python -m sparse_decode` is the `sparse-decode` command."""

from sparse_decode.cli import main

raise SystemExit(main())
