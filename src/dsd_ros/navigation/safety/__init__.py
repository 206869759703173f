# SPDX-License-Identifier: Apache-2.0
"""What stands between navigation and the motors: the supervisor, its causes and its sensors."""
