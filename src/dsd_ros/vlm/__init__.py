# SPDX-License-Identifier: Apache-2.0
"""Vision-language models: loading, prompts, one interface for draft and target, the KV cache."""
