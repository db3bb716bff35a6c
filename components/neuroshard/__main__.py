"""python -m neuroshard: the command line, where its script is not on the PATH."""

from neuroshard.cli import main

main()
