"""Answers from documents: retrieval, and two sides that answer one question together without showing theirs."""
