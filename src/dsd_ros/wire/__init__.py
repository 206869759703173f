# SPDX-License-Identifier: Apache-2.0
"""What crosses the link: message types, codec, channels."""
