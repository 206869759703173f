# SPDX-License-Identifier: Apache-2.0
"""Early exits for a frozen model, trained on its own replies."""
