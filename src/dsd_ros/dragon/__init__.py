# SPDX-License-Identifier: Apache-2.0
"""DRAGON: answers from documents of two sides that answer together without showing each other theirs."""
