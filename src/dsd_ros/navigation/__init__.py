# SPDX-License-Identifier: Apache-2.0
"""From verified text to motion: action grammar, motion controller, the run, the safety supervisor."""
