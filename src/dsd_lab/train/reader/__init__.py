# SPDX-License-Identifier: Apache-2.0
"""The small text model that answers a question from one document."""
