# SPDX-License-Identifier: Apache-2.0
"""The papers as pure functions: sampling transforms, acceptance rules, settings of a decode."""
