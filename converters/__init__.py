"""Converters: one file or package per container family."""
