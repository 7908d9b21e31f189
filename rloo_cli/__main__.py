"""`python -m rloo_cli` is `rloo`."""

from rloo_cli.cli.main import main

main()
