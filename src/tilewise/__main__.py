"""`python -m tilewise` is the command `tilewise`."""

from tilewise.cli import run

run()
