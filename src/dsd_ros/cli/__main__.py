# SPDX-License-Identifier: Apache-2.0
"""`python -m dsd_ros.cli` is the `dsd` command."""

from dsd_ros.cli.main import run

run()
