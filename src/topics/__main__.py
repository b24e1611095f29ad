"""`python -m topics`: the same as the command `topics`."""

from topics.cli import main

main()
