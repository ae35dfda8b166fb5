"""Protect users from the files, texts and servers of others."""
