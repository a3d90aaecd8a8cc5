"""The demo: a small real model, three adapters that anyone can tell apart, and a program that serves them together."""
