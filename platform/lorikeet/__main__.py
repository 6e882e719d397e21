"""The `lorikeet` command: python -m lorikeet."""

from lorikeet.cli import main

main()
