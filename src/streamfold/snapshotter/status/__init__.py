"""The state of all tables for operators."""
