# SPDX-License-Identifier: Apache-2.0
"""What only looks on: bags and the pictures that people look at."""
