"""`python -m mstar.cli`."""

from mstar.cli import main

if __name__ == "__main__":
    main()
