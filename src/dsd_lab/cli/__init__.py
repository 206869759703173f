# SPDX-License-Identifier: Apache-2.0
"""The `dsd-lab` commands, a module each: SUMMARY, add_arguments(parser), and what it runs."""
