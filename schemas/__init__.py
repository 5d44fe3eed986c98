"""Families and dialects as data, and the JSON Schemas of what the tool prints."""
