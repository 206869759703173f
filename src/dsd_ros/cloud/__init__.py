# SPDX-License-Identifier: Apache-2.0
"""The verifier: engine, sessions, server."""
