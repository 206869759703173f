# SPDX-License-Identifier: Apache-2.0
"""The `dsd` command: a module per subcommand."""
