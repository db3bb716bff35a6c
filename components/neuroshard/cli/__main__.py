"""python -m neuroshard.cli"""

from neuroshard.cli import main

main()
