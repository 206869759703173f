"""`python -m dsd_lab.cli` is the `dsd-lab` command."""

from dsd_lab.cli.main import run

run()
