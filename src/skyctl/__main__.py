"""``python -m skyctl``."""

from skyctl.cli.app import main

if __name__ == "__main__":
    main()
