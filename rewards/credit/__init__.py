"""Rewards of single agents from published papers: shaped by penalties, or gated by the form of an answer."""
