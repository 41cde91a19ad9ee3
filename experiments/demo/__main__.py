"""`python -m experiments.demo`."""

from leanqkv.cli import alone, run

from .command import demo


def main() -> None:
    """Run the command line."""
    run(alone(demo))


if __name__ == "__main__":
    main()
