"""Choosing each row's next token, alike on every rank."""
