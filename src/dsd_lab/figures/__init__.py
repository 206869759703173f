# SPDX-License-Identifier: Apache-2.0
"""Every figure that a page shows: the runs that measure it, and the blocks of the pages that show it."""
