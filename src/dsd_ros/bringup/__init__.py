# SPDX-License-Identifier: Apache-2.0
"""What starts nodes: the table of the systems, what the launch files share, and a runner of processes."""
