# SPDX-License-Identifier: Apache-2.0
"""`python -m dsd_lab.cli` is the `dsd-lab` command."""

from dsd_lab.cli.main import run

run()
