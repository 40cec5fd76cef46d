"""The `slipstream` command. Each command imports what it needs only when it runs, so that --help is quick."""


def main() -> None:
    """Entry point of the `slipstream` script."""
    from service.cli.app import run

    run()
