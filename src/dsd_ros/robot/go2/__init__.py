# SPDX-License-Identifier: Apache-2.0
"""The real Go2: its protocol, its vendor's SDK, and a stand-in for both."""
