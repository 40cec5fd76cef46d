"""`python -m service.cli`: the `slipstream` command without an installed script."""

from service.cli import main

main()
