"""The command line: one package per family of commands."""
