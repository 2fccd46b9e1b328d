"""Authenticates callers and checks their rights."""
