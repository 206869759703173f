# SPDX-License-Identifier: Apache-2.0
"""The documents of one side: store, index, retrieval."""
