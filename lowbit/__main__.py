"""`python -m lowbit`: the command line."""

from lowbit.pylib.cli.main import main

main()
