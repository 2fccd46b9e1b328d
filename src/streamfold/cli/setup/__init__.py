"""Commands that set up the command line and check that it works."""
