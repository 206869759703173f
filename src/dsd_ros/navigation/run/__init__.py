# SPDX-License-Identifier: Apache-2.0
"""One Navigate run: what a reply means, the motion it asks for, and when the next one is asked for."""
